"""Images and videos through a whole engine: processor, tower, graphs of both, decoder, against Transformers.

Two oracles: Transformers' own generation, and for graphs the same steps run eagerly on their padded buckets,
bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gapless.config import EngineConfig
from gapless.engine.build import open_engine
from gapless.engine.verify import verify_engine
from gapless.errors import ConfigError, RequestError
from gapless.graphs.encoder import EncoderRunner
from gapless.llm import LLM
from gapless.multimodal.items import MediaPrompt
from gapless.sampling.params import SamplingParams
from vl_checkpoints import (
    IMAGE_ID,
    IMAGE_PROMPT,
    VIDEO_ID,
    VIDEO_PROMPT,
    random_frames,
    random_image,
    vl_model,
    write_vl_folder,
)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_TOKENS = 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=4)
FRAMES = random_frames(4, 24, 16, seed=5)

PROMPTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "just some text"},
    "image": {
        "prompt": f"see {IMAGE_PROMPT} here",
        "multi_modal_data": {"image": random_image(32, 24, seed=1)},
    },
    "sizes": {
        "prompt": f"a {IMAGE_PROMPT} and {IMAGE_PROMPT}, then {IMAGE_PROMPT}?",
        "multi_modal_data": {"image": [random_image(*s, seed=2) for s in ((8, 8), (64, 60), (9, 130))]},
    },
    "video": {"prompt": f"watch {VIDEO_PROMPT} now", "multi_modal_data": {"video": FRAMES}},
    "both": {
        "prompt": f"{VIDEO_PROMPT} and {IMAGE_PROMPT}.",
        "multi_modal_data": {"video": [FRAMES[:2]], "image": [random_image(40, 24, seed=3)]},
    },
}
VIT = {
    "eager": {},
    "budget": {"enable_vit_cuda_graph": True, "vit_cuda_graph_budgets": [64, 256]},
    "exact": {
        "enable_vit_cuda_graph": True, "vit_cuda_graph_mode": "exact", "vit_cuda_graph_max_tokens": 256
    },
}  # fmt: skip
SMALL = {
    "device": "cpu",
    "max_running_requests": 4,
    "chunked_prefill_size": 32,  # so that borders of chunks lie inside images
    "kv_cache_tokens": 2048,
    "cuda_graph_bs_prefill": [8, 32],
    "cuda_graph_bs_decode": [1, 2, 4],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        folder = write_vl_folder(tmp_path_factory.mktemp("vl") / family, family)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        made[family] = str(folder)
    return made


@pytest.fixture(scope="module")
def llm(folders: dict[str, str]) -> Iterator[LLM]:
    with LLM(folders["qwen3_vl"], **SMALL, **VIT["budget"]) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference() -> dict[tuple[str, str], list[int]]:
    """What Transformers generates, made as it is asked for."""
    return {}


def transformers_tokens(family: str, prompt: MediaPrompt) -> list[int]:
    ids = torch.tensor([prompt.token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["mm_token_type_ids"] = (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int()
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        items = [item for item in prompt.items if item.kind == kind]
        if items:
            inputs[pixels] = torch.from_numpy(np.concatenate([item.values_PC() for item in items]))
            inputs[f"{kind}_grid_thw"] = torch.tensor([item.grid_thw for item in items])
    if family == "qwen2_5_vl" and "video_grid_thw" in inputs:
        inputs["second_per_grid_ts"] = [2 / 24] * len(inputs["video_grid_thw"])  # frames of no known rate
    made = vl_model(family).generate(
        **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
    )
    return made[0, ids.shape[1] :].tolist()


def media_prompt(llm: LLM, prompt: dict[str, Any]) -> MediaPrompt:
    data = prompt.get("multi_modal_data", {})
    as_list = {kind: v if isinstance(v, list) else [v] for kind, v in data.items()}
    assert llm.processor is not None
    return llm.processor.prompt(
        prompt["prompt"], images=as_list.get("image", ()), videos=as_list.get("video", ())
    )


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(list(PROMPTS.values()), PARAMS)
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize(
    ("family", "prefill", "vit"),
    [
        ("qwen3_vl", "full", "budget"),
        ("qwen3_vl", "breakable", "exact"),
        ("qwen3_vl", "tc_piecewise", "budget"),
        ("qwen3_vl", "disabled", "eager"),
        ("qwen2_5_vl", "full", "exact"),
        ("qwen2_5_vl", "breakable", "budget"),
        ("qwen2_5_vl", "tc_piecewise", "eager"),
        ("qwen2_5_vl", "disabled", "budget"),
        ("qwen3_vl_moe", "full", "budget"),
        ("qwen3_vl_moe", "breakable", "eager"),
    ],
)
def test_graphs_equal_padded_eager_and_transformers(
    folders: dict[str, str],
    reference: dict[tuple[str, str], list[int]],
    family: str,
    prefill: str,
    vit: str,
) -> None:
    with LLM(folders[family], **SMALL, cuda_graph_backend_prefill=prefill, **VIT[vit]) as llm:
        graphs = answers(llm)
        report = llm.report()
        assert report["failures"] == []
        phases = {row["phase"] for row in report["steps"]}
        assert ("prefill" in phases) == (prefill != "disabled")
        assert ("encoder" in phases) == (vit != "eager")
        llm.reset_prefix_cache()
        with llm.padded_eager():
            assert answers(llm) == graphs
        for (name, prompt), (prompt_ids, token_ids, _) in zip(PROMPTS.items(), graphs, strict=True):
            made = media_prompt(llm, prompt)
            assert prompt_ids == made.token_ids
            if (family, name) not in reference:
                reference[family, name] = transformers_tokens(family, made)
            assert list(token_ids) == reference[family, name], name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("vit", ["budget", "exact"])
def test_kept_embeddings_never_change_when_the_encoders_graphs_run_again(
    folders: dict[str, str], family: str, vit: str
) -> None:
    with LLM(folders[family], **SMALL, mm_embedding_cache_tokens=10_000, **VIT[vit]) as llm:
        media = llm.core.runner.media
        assert media is not None
        prompts = [
            {"prompt": IMAGE_PROMPT, "multi_modal_data": {"image": random_image(32, 24, seed=seed)}}
            for seed in range(4)
        ]
        llm.generate(prompts[:1], PARAMS)
        (kept,) = media.cache._items.values()
        tensors = [t for t in (kept.embeds_NE, kept.deepstack_LNE) if t is not None]
        before = [tensor.clone() for tensor in tensors]
        llm.generate(prompts[1:], PARAMS)
        llm.generate(prompts[:1], PARAMS)
        assert media.cache.num_encoded == 4, "the first one was not encoded again"
        assert sum(row["count"] for row in llm.report()["steps"] if row["phase"] == "encoder") >= 2
        for tensor, wanted in zip(tensors, before, strict=True):
            assert torch.equal(tensor, wanted)


def test_logits_are_those_of_transformers(llm: LLM) -> None:
    """Log-probabilities of the first token, whose differences are those of the logits."""
    made = media_prompt(llm, PROMPTS["sizes"])
    items = made.items
    with torch.no_grad():
        logits = vl_model("qwen3_vl")(
            input_ids=(ids := torch.tensor([made.token_ids])),
            mm_token_type_ids=(ids == IMAGE_ID).int(),
            pixel_values=torch.from_numpy(np.concatenate([item.values_PC() for item in items])),
            image_grid_thw=torch.tensor([item.grid_thw for item in items]),
        ).logits[0, -1]
    expected = torch.log_softmax(logits, -1)
    (output,) = llm.generate(PROMPTS["sizes"], PARAMS)
    first = output.outputs[0].logprobs[0]
    assert len(first) >= 4
    for token, found in first.items():
        assert abs(found.logprob - float(expected[token])) < 1e-4


def test_a_default_start_has_prefill_graphs_and_no_encoder_graphs(folders: dict[str, str]) -> None:
    with LLM(folders["qwen2_5_vl"], **SMALL) as llm:
        report = llm.report()
        assert report["plan"]["prefill"]["strategy"] == "full"
        assert report["media"]["encoder"]["mode"] == "off"
        assert "encoder" in report["startup"]["seconds"]
        llm.generate(PROMPTS["image"], PARAMS)
        assert {"phase": "encoder", "reason": "disabled", "count": 1} in llm.report()["eager"]


def test_graphs_of_the_encoder_are_told_and_counted(folders: dict[str, str]) -> None:
    told: list[tuple[str, int, int]] = []
    with LLM(
        folders["qwen3_vl"], **SMALL, **VIT["budget"], progress=lambda *event: told.append(event)
    ) as llm:
        assert [event for event in told if event[0] == "encoder"] == [("encoder", 1, 2), ("encoder", 2, 2)]
        assert [row["num_tokens"] for row in llm.report()["graphs"] if row["phase"] == "encoder"] == [256, 64]
        llm.generate([PROMPTS["image"], PROMPTS["image"]], PARAMS)
        (row,) = [row for row in llm.report()["steps"] if row["phase"] == "encoder"]
        assert (row["bucket"], row["count"]) == (64, 1)
        json.dumps(llm.report())
    assert llm.report()["memory"]["pool_bytes"] == 0


def test_what_is_asked_of_the_encoder_reaches_it(folders: dict[str, str], monkeypatch: Any) -> None:
    monkeypatch.setenv("GAPLESS_VIT_ENABLE_CUDA_GRAPH", "1")
    options = {"vit_cuda_graph_max_tokens": 128, "mm_embedding_cache_tokens": 7}
    with LLM(folders["qwen2_5_vl"], **SMALL, **options) as llm:
        media = llm.report()["media"]
        assert [row["tokens"] for row in media["encoder"]["budgets"]] == [64, 128]
        assert media["embedding_cache"]["capacity_bytes"] == 7 * 64 * 4


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "path"},
        {"type": "image", "image": "picture"},
        {"type": "image_url", "image_url": {"url": "data"}},
        {"type": "image_url", "image_url": "data"},
    ],
    ids=lambda part: f"{part['type']}-{type(part[part['type']]).__name__}-{part[part['type']]}"[:30],
)
def test_chats_take_images_in_every_form(llm: LLM, tmp_path: Path, part: dict[str, Any]) -> None:
    import base64
    import io

    picture = random_image(32, 24, seed=1)
    (file := tmp_path / "picture.png").write_bytes(b"")
    picture.save(file)
    picture.save(stream := io.BytesIO(), format="PNG")
    data = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    forms = {"path": str(file), "picture": picture, "data": data}
    source = part[part["type"]]
    made = {"url": forms[source["url"]]} if isinstance(source, dict) else forms[source]
    content = [{"type": "text", "text": "what is "}, {**part, part["type"]: made}]
    (output,) = llm.chat([{"role": "user", "content": content}], PARAMS)
    expected = {
        "prompt": f"<|im_start|>user\nwhat is {IMAGE_PROMPT}<|im_end|>\n<|im_start|>assistant\n",
        "multi_modal_data": {"image": picture},
    }
    (same,) = llm.generate(expected, PARAMS)
    assert output.prompt == expected["prompt"]
    assert output.prompt_token_ids == same.prompt_token_ids
    assert output.outputs[0].token_ids == same.outputs[0].token_ids


def test_a_stream_shows_images_as_they_were_when_it_was_asked_for(llm: LLM) -> None:
    """It begins to run later; ``generate`` reads them on its way, and what it has kept is not mistaken."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3)
    image = random_image(64, 64, seed=11)
    prompt = {"prompt": f"see {IMAGE_PROMPT}", "multi_modal_data": {"image": image}}
    (before,) = llm.generate(prompt, params)
    stream = llm.stream(prompt, params)
    image.paste((250, 0, 0), (0, 0, 64, 64))
    *_, streamed = stream
    (after,) = llm.generate(prompt, params)
    assert streamed.outputs[0].logprobs == before.outputs[0].logprobs
    assert after.outputs[0].logprobs != before.outputs[0].logprobs


def test_token_ids_and_text_mean_the_same(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPTS["image"]["prompt"], add_special_tokens=False)
    data = PROMPTS["image"]["multi_modal_data"]
    outputs = llm.generate(
        [
            PROMPTS["image"],
            {"prompt": ids, "multi_modal_data": data},
            {"prompt_token_ids": ids, "multi_modal_data": data},
        ],
        PARAMS,
    )
    assert len({output.outputs[0].token_ids for output in outputs}) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "no place", "multi_modal_data": {"image": random_image(8, 8)}}, "0 image placeholders"),
        ({"prompt": IMAGE_PROMPT, "multi_modal_data": {"sound": 1}}, "multi_modal_data has \\['sound'\\]"),
        ({"prompt": IMAGE_PROMPT, "multi_modal_data": {"image": "nowhere.png"}}, "image 1: nowhere.png"),
        ({"multi_modal_data": {"image": random_image(8, 8)}}, "give 'prompt' \\(text\\)"),
        (
            {"prompt": "a" * 600 + IMAGE_PROMPT, "multi_modal_data": {"image": random_image(8, 8)}},
            "at most 511 fit",
        ),
    ],
)
def test_unusable_prompts_fail_alone_and_say_why(llm: LLM, prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, PARAMS)
    good, bad = llm.generate([PROMPTS["image"], prompt], PARAMS, errors="return")
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, r"messages\[0\].content\[0\]: a part of type 'image' needs"),
        ({"type": "image_url", "image_url": {}}, r"content\[0\]: image_url must be like"),
        (
            {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
            r"content\[0\]: image_url takes data URLs only",
        ),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "'image': a path or a picture"),
        ({"type": "video_url", "video_url": "file:///etc/passwd"}, "'video': a path or frames"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "image 1: a data URL must begin"),
    ],
)
def test_unusable_parts_are_named_by_their_place(llm: LLM, part: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": [part]}], PARAMS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vit_cuda_graph_mode": "exact"}, "add --enable-vit-cuda-graph"),
        ({"enable_vit_cuda_graph": True, "enforce_eager": True}, "--enforce-eager contradicts"),
        ({**VIT["budget"], "vit_cuda_graph_mode": "exact"}, "has no meaning with"),
        ({**VIT["budget"], "vit_cuda_graph_max_tokens": 128}, "contradicts the largest"),
        ({"enable_vit_cuda_graph": True, "vit_cuda_graph_mode": "both"}, "must be one of budget, exact"),
    ],
)
def test_options_of_the_encoder_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("nowhere", **options)


@pytest.mark.parametrize(("family", "vit"), [("qwen3_vl", "budget"), ("qwen2_5_vl", "exact")])
def test_verification_checks_the_encoder_too_and_finds_a_wrong_one(
    folders: dict[str, str], family: str, vit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**SMALL, **VIT[vit], "cuda_graph_backend_prefill": "disabled"}
    opened = open_engine(EngineConfig.from_sources(python={"model": folders[family], **options}))
    report = verify_engine(opened, only_few_sizes=True)
    assert report.is_ok, str(report)
    assert {r.check for r in report.results if r.target == "encoder"} == {
        "equals padded eager", "close to plain eager", "ignores padding"
    }  # fmt: skip
    assert "encoder" not in {row["phase"] for row in opened.runner.report()["steps"]}
    monkeypatch.setattr(EncoderRunner, "run", lambda self, items: self.eager(items[::-1]))
    assert "encoder" in {result.target for result in verify_engine(opened, only_few_sizes=True).failures}
    opened.runner.shutdown()
