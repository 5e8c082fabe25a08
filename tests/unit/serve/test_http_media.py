"""Images and videos in chats: how they reach the engine, and what is said about those that cannot."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from http_fakes import MODEL, Connection, FakeClient, call, post
from media_files import animated, data_url, pixels, png, png_header, saved, video
from PIL import Image

from gapless.config_media import parse_processor_kwargs
from gapless.models.sources import open_tokenizer
from gapless.multimodal import items
from gapless.multimodal.loading import MediaLoader
from gapless.multimodal.opening import open_processor
from gapless.multimodal.overrides import override
from gapless.serve.app import create_app
from gapless.serve.media import MediaDesk
from gapless.serve.settings import ServerSettings
from vl_checkpoints import IMAGE_ID, VIDEO_ID, write_vl_folder

CHAT = "/v1/chat/completions"
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content -%}
{% if c.type in ('image', 'video') %}<|vision_start|><|{{ c.type }}_pad|><|vision_end|>\
{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PNG_URL = data_url(png(40, 32))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request, tmp_path_factory) -> Path:
    return write_vl_folder(tmp_path_factory.mktemp("vl") / request.param, request.param, has_weights=False)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return write_vl_folder(tmp_path_factory.mktemp("vl") / "qwen3", "qwen3_vl", has_weights=False)


def make_app(folder: Path, client: FakeClient | None = None, *, kwargs: Any = "{}", **settings: Any) -> Any:
    tokenizer = open_tokenizer(str(folder))
    processor = open_processor(str(folder), tokenizer)
    assert processor is not None
    processor = override(processor, parse_processor_kwargs(kwargs))
    settings = {"access_log": "off", "chat_template": TEMPLATE, **settings}
    return create_app(client or make_client(), ServerSettings(**settings), tokenizer, processor)


def make_client(script: Any = None, **info: Any) -> FakeClient:
    return FakeClient(script, **{"takes_media": True, "vocab_size": 272, "max_model_len": 512, **info})


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    """A chat of one message, whose parts are text, or kind and URL."""
    return {"model": MODEL, "messages": [{"role": "user", "content": [part(p) for p in parts]}], **fields}


def part(value: Any) -> Any:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if isinstance(value, tuple):
        kind, url, *more = value
        return {"type": f"{kind}_url", f"{kind}_url": {"url": url, **(more[0] if more else {})}}
    return value


def image(width: int = 40, height: int = 32, *, seed: int = 0) -> tuple[str, str]:
    return "image", data_url(png(width, height, seed=seed))


def test_an_image_reaches_the_engine_as_patches_and_placeholders(folder):
    client = make_client()
    answer = post(make_app(folder, client), CHAT, body("Look: ", image(40, 32), " What?"))
    assert answer.status_code == 200, answer.text
    (request,) = client.requests
    (item,) = request.media.parts
    assert (item.kind, item.grid_thw) == ("image", (1, 8, 10))
    assert item.patches_PC.shape[0] == 80
    assert item.patches_PC.dtype == np.uint8
    assert item.normalisation is not None
    ((start, length),) = item.ranges
    assert length == 20
    assert request.prompt_token_ids[start : start + length] == [IMAGE_ID] * 20
    assert request.prompt_token_ids.count(IMAGE_ID) == 20
    assert request.media.rope_positions_3T.shape == (3, len(request.prompt_token_ids))
    assert answer.json()["usage"]["prompt_tokens"] == len(request.prompt_token_ids)


def test_it_is_what_the_processor_makes_of_it(folder):
    client = make_client()
    post(make_app(folder, client), CHAT, body(image(40, 32), "?"))
    (request,) = client.requests
    tokenizer = open_tokenizer(str(folder))
    processor = open_processor(str(folder), tokenizer)
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"
    expected = processor.prompt(text, images=[Image.fromarray(pixels(40, 32))])
    found = request.media.prompt(request.prompt_token_ids)
    assert found.token_ids == expected.token_ids
    np.testing.assert_array_equal(found.rope_positions_3T, expected.rope_positions_3T)
    assert found.rope_delta == expected.rope_delta
    np.testing.assert_array_equal(found.items[0].values_PC(), expected.items[0].values_PC())
    assert found.items[0].content_hash == expected.items[0].content_hash


def test_contents_are_hashed_by_a_thread_that_prepares_media(folder, monkeypatch):
    """Never by the one that serves all connections."""
    threads: list[str] = []
    sha256 = hashlib.sha256

    def noted(data: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return sha256(data)

    monkeypatch.setattr(items, "hashlib", SimpleNamespace(sha256=noted))
    assert post(make_app(folder, make_client()), CHAT, body(image(), "?")).status_code == 200
    assert len(threads) == 1
    assert threads[0].startswith("media")


def test_several_images_keep_their_order_over_messages(folder):
    client = make_client()
    messages = [
        *body(image(16, 16, seed=1), "and", image(24, 16, seed=2))["messages"],
        {"role": "assistant", "content": "Nice."},
        *body(image(16, 32, seed=3))["messages"],
    ]
    post(make_app(folder, client), CHAT, {"model": MODEL, "messages": messages})
    parts = client.requests[0].media.parts
    assert [item.grid_thw for item in parts] == [(1, 4, 4), (1, 4, 6), (1, 8, 4)]
    assert [item.ranges[0] for item in parts] == sorted(item.ranges[0] for item in parts)
    assert len({item.content_hash for item in parts}) == 3


@pytest.mark.parametrize(
    "data",
    [video(range(0, 200, 10)), animated("GIF", [(9 * i, 9, 9) for i in range(8)])],
    ids=["mp4", "gif"],
)
def test_a_video_becomes_one_item(folder, data):
    client = make_client()
    mime = "image/gif" if data.startswith(b"GIF") else "video/mp4"
    answer = post(make_app(folder, client), CHAT, body(("video", data_url(data, mime)), "?"))
    assert answer.status_code == 200, answer.text
    (item,) = client.requests[0].media.parts
    assert item.kind == "video"
    assert item.grid_thw[0] == 2
    assert sum(length for _, length in item.ranges) == client.requests[0].prompt_token_ids.count(VIDEO_ID)


@pytest.mark.parametrize(("detail", "grid"), [("low", (1, 4, 128)), ("auto", None), ("high", None)])
def test_detail_low_scales_an_image_down(folder, detail, grid):
    """The processor is told to keep what it gets: 512 pixels are 128 patches of 4."""
    client = make_client(max_model_len=4096)
    app = make_app(folder, client, kwargs={"max_pixels": 2**22})
    shown = ("image", data_url(png(1024, 32)), {"detail": detail})
    post(app, CHAT, body(shown))
    assert client.requests[0].media.parts[0].grid_thw == (grid or (1, 8, 256))


@pytest.mark.parametrize(
    ("kwargs", "image_tokens"),
    [
        ({}, 20),
        ({"max_pixels": 8 * 8 * 6}, 4),
        ({"images_kwargs": {"max_pixels": 8 * 8 * 6}}, 4),
        ({"videos_kwargs": {"max_pixels": 8 * 8 * 6}}, 20),
        ({"min_pixels": 64 * 48}, 56),
    ],
)
def test_the_processors_settings_act(qwen3, kwargs, image_tokens):
    client = make_client()
    post(make_app(qwen3, client, kwargs=kwargs), CHAT, body(image(40, 32)))
    assert client.requests[0].prompt_token_ids.count(IMAGE_ID) == image_tokens


@pytest.mark.parametrize(
    ("kwargs", "steps"), [({}, 2), ({"fps": 10}, 10), ({"videos_kwargs": {"num_frames": 6}}, 3)]
)
def test_the_sampling_of_frames_follows_its_settings(qwen3, kwargs, steps):
    client = make_client()
    clip = ("video", data_url(video(range(0, 200, 10), size=(16, 16)), "video/mp4"))
    answer = post(make_app(qwen3, client, kwargs=kwargs), CHAT, body(clip))
    assert answer.status_code == 200, answer.text
    assert client.requests[0].media.parts[0].grid_thw[0] == steps


def test_a_limit_of_frames_makes_sampling_take_fewer(qwen3):
    client = make_client()
    clip = ("video", data_url(video(range(0, 200, 10), size=(16, 16)), "video/mp4"))
    post(make_app(qwen3, client, kwargs={"fps": 10}, max_video_frames=6), CHAT, body(clip))
    assert client.requests[0].media.parts[0].grid_thw[0] == 3


def test_text_alone_needs_no_processor(folder):
    client = make_client()
    assert post(make_app(folder, client), CHAT, body("Hi")).status_code == 200
    assert client.requests[0].media is None


def test_tokenize_expands_images(folder):
    app = make_app(folder)
    tokens = post(app, "/tokenize", {"messages": body(image(40, 32))["messages"]}).json()
    assert tokens["tokens"].count(IMAGE_ID) == 20
    usage = post(app, CHAT, body(image(40, 32))).json()["usage"]
    assert tokens["count"] == usage["prompt_tokens"]


def test_what_a_model_reads_is_shown(folder):
    app = make_app(folder)
    assert call(app, "GET", "/v1/models").json()["data"][0]["input_modalities"] == ["text", "image", "video"]
    info = call(app, "GET", "/server_info").json()
    assert info["input_modalities"] == ["text", "image", "video"]
    assert info["settings"]["limit_mm_per_prompt"] == {"image": 16, "video": 1}


def test_metrics_count_what_was_prepared(folder):
    app = make_app(folder)
    post(app, CHAT, body(image(), image(16, 16)))
    post(app, CHAT, body(("image", "data:image/png;base64,AAAA")))
    text = call(app, "GET", "/metrics").text
    assert 'gapless:media_items_total{kind="image"} 2.0' in text
    assert 'gapless:media_items_total{kind="video"} 0.0' in text
    assert 'gapless:media_prepare_seconds_count{engine="0",model_name="fake-model"} 1.0' in text


@pytest.mark.parametrize(
    ("parts", "param", "message"),
    [
        ([("image", "data:image/png;base64,!!")], 0, "its data URL is not base64"),
        ([("image", data_url(b"nothing"))], 0, "these bytes are no image that can be read"),
        ([("image", data_url(b"<svg/>", "image/svg+xml"))], 0, "SVG is a drawing, not pixels"),
        ([("image", data_url(png(), "text/html"))], 0, "has the type 'text/html'; expected image/..."),
        ([("image", data_url(png_header(30_000, 30_000)))], 0, "pixels"),
        ([("image", data_url(png(1, 201)))], 0, "one side over 200 times the other"),
        ([("image", data_url(png(40, 40)[:500]))], 0, "broken or cut short"),
        ([("image", "https://example.org/a.png")], 0, "nothing is fetched from the web"),
        ([("image", "http://169.254.169.254/latest")], 0, "nothing is fetched from the web"),
        ([("image", "file:///etc/passwd")], 0, "files of the server are not read"),
        ([("image", "/etc/passwd")], 0, "is no URL that can be read"),
        (["Look", image(), ("image", "data:image/png;base64,A")], 2, "not base64"),
        ([("video", PNG_URL)], 0, "has the type 'image/png'; expected video/..."),
        ([("video", data_url(b"#EXTM3U", "video/mp4"))], 0, "no video that can be read"),
        ([image()] * 17, 16, "at most 16 images; send fewer, or raise --limit-mm-per-prompt image=N"),
    ],
)
def test_what_is_wrong_with_a_part_is_a_400_that_names_it(qwen3, parts, param, message):
    client = make_client()
    answer = post(make_app(qwen3, client), CHAT, body(*parts))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == f"messages[0].content[{param}]"
    assert error["message"].startswith(error["param"] + ": ")
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert client.requests == []


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (png(1, 1), "image/png"),
        (png(1, 200), "image/png"),
        (saved(Image.new("CMYK", (20, 16), (10, 200, 30, 40)), "JPEG"), "image/jpeg"),
        (saved(Image.fromarray(np.full((9, 9), 30_000, np.uint16))), "image/png"),
        (saved(Image.new("LA", (12, 12), (9, 128))), "image/png"),
        (animated("GIF", [(255, 0, 0), (0, 255, 0)]), "image/gif"),
        (animated("WEBP", [(255, 0, 0), (0, 255, 0)]), "image/webp"),
    ],
    ids=["1x1", "1x200", "CMYK", "16-bit", "transparent", "animated-gif", "animated-webp"],
)
def test_images_of_every_kind_become_finite_patches_of_their_grid(folder, data, mime):
    client = make_client()
    answer = post(make_app(folder, client), CHAT, body("a", ("image", data_url(data, mime))))
    assert answer.status_code == 200
    (request,) = client.requests
    (item,) = request.media.prompt(request.prompt_token_ids).items
    assert item.num_patches == np.prod(item.grid_thw)
    assert np.isfinite(item.values_PC()).all()
    assert request.prompt_token_ids.count(IMAGE_ID) == np.prod(item.grid_thw) // 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            "parts of type 'input_audio' are not",
        ),
        (
            {"type": "audio_url", "audio_url": {"url": "x"}},
            "content parts of type 'audio_url' are not supported",
        ),
        ({"type": "file", "file": {"file_id": "x"}}, "content parts of type 'file' are not supported"),
        (
            {"type": "image", "image": "x"},
            "type 'image' are not supported: send text, refusal, image_url, video_url",
        ),
        ({"type": "image_url"}, "a content part of type 'image_url' needs the field 'image_url'"),
        ({"type": "image_url", "image_url": {}}, "field 'messages[0].content[0].image_url.url' is required"),
        ({"type": "image_url", "image_url": {"url": ""}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": PNG_URL}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "ultra"}}, "'auto', 'low' or 'high'"),
        ({"type": "image_url", "image_url": {"url": "x", "size": 3}}, "unknown or unsupported field"),
        ({"type": "video_url", "video_url": {"url": "x", "fps": 3}}, "unknown or unsupported field"),
        ({"type": "text", "text": "a", "image_url": {"url": "x"}}, "of type 'text' has no field 'image_url'"),
        ({"type": "image_url", "image_url": {"url": "x"}, "text": "a"}, "'image_url' has no field 'text'"),
    ],
)
def test_parts_of_another_form_are_a_400(qwen3, content, message):
    answer = post(make_app(qwen3), CHAT, body(content))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_only_users_show_images(qwen3, role):
    messages = [{"role": role, "content": [part(image())]}, {"role": "user", "content": "?"}]
    answer = post(make_app(qwen3), CHAT, {"model": MODEL, "messages": messages})
    assert answer.status_code == 400
    assert f"belong to messages of a user, not to role '{role}'" in answer.json()["error"]["message"]


def test_a_model_without_vision_says_so(qwen3):
    tokenizer = open_tokenizer(str(qwen3))
    for client, processor in (
        (make_client(takes_media=False), open_processor(str(qwen3), tokenizer)),
        (make_client(), None),
    ):
        settings = ServerSettings(access_log="off", chat_template=TEMPLATE)
        app = create_app(client, settings, tokenizer, processor)
        answer = post(app, CHAT, body("a", image()))
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "messages[0].content[1]: content parts of type 'image_url' are not supported: this "
            "model reads text only",
            "type": "invalid_request_error",
            "param": "messages[0].content[1]",
            "code": "invalid_value",
        }
        assert call(app, "GET", "/v1/models").json()["data"][0]["input_modalities"] == ["text"]


def test_placeholders_in_a_users_text_do_not_pass_for_images(qwen3):
    answer = post(make_app(qwen3), CHAT, body("<|image_pad|>", image()))
    assert answer.status_code == 400
    assert "2 image placeholders" in answer.json()["error"]["message"]


def test_placeholders_without_any_image_are_text_like_any_other(qwen3):
    client = make_client()
    assert post(make_app(qwen3, client), CHAT, body("<|image_pad|><|video_pad|>")).status_code == 200
    (request,) = client.requests
    assert request.media is None
    assert [request.prompt_token_ids.count(token) for token in (IMAGE_ID, VIDEO_ID)] == [1, 1]


def test_a_template_that_shows_no_images_is_refused(qwen3):
    app = make_app(qwen3, chat_template="{% for m in messages %}{{ m.role }}{% endfor %}")
    answer = post(app, CHAT, body(image()))
    assert answer.status_code == 400
    assert "0 image placeholders" in answer.json()["error"]["message"]


def test_more_tokens_than_the_model_has_are_refused_before_pixels_are_touched(qwen3):
    answer = post(make_app(qwen3, make_client(max_model_len=20)), CHAT, body(image(40, 32)))
    assert answer.status_code == 400
    assert "20 of them for images and videos" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "parts", "message"),
    [
        ({"limit_mm_per_prompt": (("image", 1), ("video", 0))}, [image(), image()], "at most 1 images"),
        ({"limit_mm_per_prompt": (("image", 1), ("video", 0))}, [("video", PNG_URL)], "at most 0 videos"),
        ({"max_image_pixels": 100}, [image()], "40 x 32 pixels, the limit is 100"),
        ({"max_image_bytes": 100}, [image()], "the limit is 100"),
        ({"max_decoded_pixels": 2000}, [image(), image()], "2560 pixels together, the limit is 2000"),
        (
            {"max_video_seconds": 1},
            [("video", data_url(video(range(30)), "video/mp4"))],
            "lasts 3 seconds, the limit is 1",
        ),
    ],
)
def test_each_limit_acts(qwen3, settings, parts, message):
    answer = post(make_app(qwen3, **settings), CHAT, body(*parts))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_file_below_the_allowed_folder_is_read(qwen3, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    client = make_client()
    app = make_app(qwen3, client, allowed_local_media_path=str(tmp_path))
    assert post(app, CHAT, body(("image", f"file://{tmp_path}/a.png"))).status_code == 200
    assert client.requests[0].media is not None
    answer = post(app, CHAT, body(("image", f"file://{tmp_path}/../a.png")))
    assert "not below the folder" in answer.json()["error"]["message"]


class TestPool:
    """Work that a test can hold up: the loader waits until it is let go."""

    @pytest.fixture
    def gate(self, monkeypatch):
        opened, started = threading.Event(), threading.Semaphore(0)
        load = MediaLoader.image

        def slow(self, url, **options):
            started.release()
            assert opened.wait(10)
            return load(self, url, **options)

        monkeypatch.setattr(MediaLoader, "image", slow)
        yield opened, started
        opened.set()

    def test_a_caller_that_goes_away_is_not_served(self, qwen3, gate):
        opened, started = gate

        async def scenario():
            client = make_client()
            app = make_app(qwen3, client)
            request = json.dumps(body(image())).encode()
            first = Connection(app, CHAT, request)
            while not started.acquire(blocking=False):
                await asyncio.sleep(0.001)
            first.gone.set()
            await asyncio.wait_for(first.task, 5)
            assert client.requests == []
            assert first.sent == []
            opened.set()
            second = Connection(app, CHAT, request)
            await asyncio.wait_for(second.task, 5)
            assert second.is_complete
            assert len(client.requests) == 1

        asyncio.run(scenario())

    def test_the_event_loop_goes_on_meanwhile(self, qwen3, gate):
        opened, started = gate

        async def scenario():
            app = make_app(qwen3)
            shown = Connection(app, CHAT, json.dumps(body(image())).encode())
            while not started.acquire(blocking=False):
                await asyncio.sleep(0.001)
            text = Connection(app, CHAT, json.dumps(body("Hi")).encode())
            await asyncio.wait_for(text.task, 5)
            assert text.is_complete
            assert not shown.task.done()
            opened.set()
            await asyncio.wait_for(shown.task, 5)
            assert shown.is_complete

        asyncio.run(scenario())

    def test_what_waits_is_bounded_in_number(self, qwen3, gate):
        opened, _ = gate

        async def scenario():
            app = make_app(qwen3, max_queued_requests=3)
            request = json.dumps(body(image())).encode()
            connections = [Connection(app, CHAT, request) for _ in range(5)]
            while sum(connection.task.done() for connection in connections) < 2:
                await asyncio.sleep(0.005)
            refused = [c for c in connections if c.task.done()]
            assert [connection.sent[0]["status"] for connection in refused] == [429, 429]
            opened.set()
            await asyncio.wait_for(asyncio.gather(*(c.task for c in connections)), 10)
            statuses = sorted(connection.sent[0]["status"] for connection in connections)
            assert statuses == [200, 200, 200, 429, 429]

        asyncio.run(scenario())

    def test_what_waits_is_bounded_in_bytes_and_freed_again(self, qwen3, gate):
        opened, _ = gate

        async def scenario():
            app = make_app(qwen3, max_body_bytes=8000)
            request = json.dumps(body(("image", data_url(png(40, 32))))).encode()
            assert 5000 < len(request) < 8000
            connections = [Connection(app, CHAT, request) for _ in range(30)]
            done = 0
            while not done:
                await asyncio.sleep(0.005)
                done = sum(connection.task.done() for connection in connections)
            opened.set()
            await asyncio.wait_for(asyncio.gather(*(c.task for c in connections)), 10)
            statuses = [connection.sent[0]["status"] for connection in connections]
            assert set(statuses) == {200, 429}
            assert statuses.count(200) >= 16
            again = Connection(app, CHAT, request)
            await asyncio.wait_for(again.task, 5)
            assert again.sent[0]["status"] == 200

        asyncio.run(scenario())


def test_many_requests_at_once_are_all_served(qwen3):
    async def scenario():
        client = make_client()
        app = make_app(qwen3, client)
        requests = [json.dumps(body(image(16 + 8 * (i % 4), 16, seed=i))).encode() for i in range(12)]
        connections = [Connection(app, CHAT, request) for request in requests]
        await asyncio.wait_for(asyncio.gather(*(c.task for c in connections)), 20)
        assert [c.sent[0]["status"] for c in connections] == [200] * 12
        assert len({r.media.parts[0].content_hash for r in client.requests}) == 12

    asyncio.run(scenario())


def test_a_flood_of_good_and_broken_images_leaves_nothing_held(qwen3, monkeypatch):
    desks = []
    make_desk = MediaDesk.__init__
    monkeypatch.setattr(
        MediaDesk, "__init__", lambda self, *a, **k: desks.append(self) or make_desk(self, *a, **k)
    )
    broken = ["data:image/png;base64,AAAA", "data:,x", data_url(png(40, 32)[:60]), "file:///etc/passwd"]

    async def scenario():
        app = make_app(qwen3)
        parts = [image(16, 16, seed=i) if i % 2 else ("image", broken[i // 2 % 4]) for i in range(50)]
        connections = [Connection(app, CHAT, json.dumps(body(part)).encode()) for part in parts]
        await asyncio.wait_for(asyncio.gather(*(c.task for c in connections)), 20)
        assert [c.sent[0]["status"] for c in connections] == [400, 200] * 25

    asyncio.run(scenario())
    assert [(desk.num_inside, desk.num_held) for desk in desks] == [(0, 0)]


def test_the_same_image_in_another_file_has_the_same_name(qwen3):
    client = make_client()
    app = make_app(qwen3, client)
    picture = Image.fromarray(pixels(16, 16))
    for data, mime in ((saved(picture, "PNG"), "image/png"), (saved(picture, "BMP"), "image/bmp")):
        post(app, CHAT, body(("image", f"data:{mime};base64,{base64.b64encode(data).decode()}")))
    first, second = (request.media.parts[0].content_hash for request in client.requests)
    assert first == second
