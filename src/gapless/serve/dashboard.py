"""``/dashboard``: one page that shows the graphs at work, and the data it asks for once a second.

The page is three files of ``pages/`` put into one document. Nothing of a server, a model or a caller is ever
written into it: all of that comes as JSON and reaches the document as text nodes, and the content security
policy names the hashes of the one script and the one style sheet, so that nothing else could run. The page is
open to everybody and says nothing by itself; its data needs a key where the server does, which the page asks
for and sends as a header. Read ``live.py`` for the numbers over time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from gapless.serve.context import ServeContext
from gapless.serve.live import LiveWindow
from gapless.serve.routes.replies import json_reply
from gapless.serve.version import version

SAMPLE_S = 1.0

_PHASES = ("prefill", "decode")


def dashboard_router(context: ServeContext) -> APIRouter:
    """The page and its data. While the application lives, a point is sampled every second."""
    window = LiveWindow(context.client.stats, context.metrics)

    @contextlib.asynccontextmanager
    async def sampling(_: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(_sample_forever(window), name="dashboard-samples")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    router = APIRouter(lifespan=sampling)
    page, headers = make_page()

    @router.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    @router.get("/dashboard/data", tags=["status"])
    async def dashboard_data() -> Response:
        """What the page shows; refreshed once a second."""
        window.sample_if_due(SAMPLE_S / 2)
        reply = json_reply(dashboard_values(context, window))
        reply.headers["Cache-Control"] = "no-store"
        return reply

    return router


def make_page() -> tuple[bytes, dict[str, str]]:
    """The document, and the headers it is served with."""
    folder = files("gapless.serve") / "pages"
    html, css, script = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("dashboard.html", "dashboard.css", "dashboard.js")
    )
    policy = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(css)}'",
        "img-src data:",  # the empty icon, which saves browsers from asking for one
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    page = html.replace("/*STYLE*/", css).replace("/*SCRIPT*/", script)
    return page.encode(), {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def dashboard_values(context: ServeContext, window: LiveWindow) -> dict[str, Any]:
    """Everything on the page. ``stats`` values are None until the engine has said something."""
    client = context.client
    info, stats = client.info, client.stats()
    age_s = client.step_age_s()
    plan = info.plan
    queries = stats.get("prefix_cache_queries", 0)
    return {
        "server": {
            "version": version(),
            "model": context.model_names[0],
            "device": info.device,
            "max_model_len": info.max_model_len,
            "max_running_requests": info.max_running_requests,
            "startup_s": info.startup_s,
            "can_chat": bool(
                context.settings.chat_template or getattr(context.tokenizer, "chat_template", "")
            ),
        },
        "health": {
            "is_healthy": client.is_healthy,
            "is_draining": client.is_draining,
            "step_age_s": None if age_s is None else round(age_s, 1),
            "replicas": [
                {"index": each.index, "state": each.state, "is_healthy": each.is_healthy}
                for each in client.replicas()
            ],
        },
        "now": {
            **{
                name: stats.get(name)
                for name in (
                    *("uptime_s", "num_running", "num_waiting", "kv_usage", "num_blocks", "num_free_blocks"),
                    *("num_preemptions", "prompt_tokens", "generation_tokens", "num_steps", "num_graphs"),
                    *("capture_s", "pool_bytes", "driver_bytes", "requests_finished", "requests_refused"),
                )
            },
            "prefix_hit_rate": round(stats["prefix_cache_hits"] / queries, 4) if queries else None,
            "http_open": context.metrics.num_open,
        },
        **window.summary(),
        "ladder": ladder(plan, stats.get("replays", [])),
        "eager": stats.get("eager", []),
        "steps": stats.get("recent_steps", []),
        "plan": {
            "mode": plan.get("mode"),
            "phases": {phase: plan[phase] for phase in _PHASES if isinstance(plan.get(phase), dict)},
            "decisions": plan.get("decisions", []),
        },
    }


def ladder(plan: Mapping[str, Any], replays: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per captured size, ascending within its phase, those that were never hit included."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for phase in _PHASES:
        planned = plan.get(phase)
        if not isinstance(planned, dict):
            continue
        for size in planned["sizes"]:
            key = (phase, planned["strategy"], size)
            rows[key] = {
                **{"phase": phase, "strategy": planned["strategy"], "bucket": size},
                **{"count": 0, "tokens": 0, "padding": 0},
            }
    for replay in replays:
        rows[replay["phase"], replay["strategy"], replay["bucket"]] = replay
    order = {phase: number for number, phase in enumerate(_PHASES)}
    return sorted(rows.values(), key=lambda row: (order.get(row["phase"], 9), row["phase"], row["bucket"]))


async def _sample_forever(window: LiveWindow) -> None:
    while True:
        window.sample()
        await asyncio.sleep(SAMPLE_S)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
