"""A whole server around an engine without a model, as a program: ``python fake_server.py PORT_FILE [JSON]``.

The same ``run_server`` and the same application as ``gapless serve``; the address goes to ``PORT_FILE`` once
requests are taken. JSON: ``engine`` and ``settings``, fields of ``OpenFake`` and ``ServerSettings``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "serve"))

from engine_process_fakes import OpenFake, WordTokenizer

from gapless.serve.app import create_app
from gapless.serve.server import Announcements, run_server
from gapless.serve.settings import ServerSettings


def main() -> int:
    port_file = Path(sys.argv[1])
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    settings = ServerSettings(
        port=0, access_log="off", served_model_names=("fake",), **options.get("settings", {})
    )
    announce = Announcements(
        progress=lambda stage, done, total: None,
        on_ready=lambda info: None,
        on_serving=lambda address: write_whole(port_file, address),
    )
    tokenizer = WordTokenizer()
    return run_server(
        OpenFake(**options.get("engine", {})),
        lambda client: create_app(client, settings, tokenizer),
        settings,
        announce,
    )


def write_whole(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main())
