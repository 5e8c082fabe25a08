"""``python3 -m gapless.launch_server``: ``gapless serve`` under the name that users of SGLang know.

Same options, same exit codes; read ``cli/serve.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gapless.cli.main import main as run_command


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(["serve", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
