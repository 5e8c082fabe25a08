"""``LLM``: the offline engine. Prompts in, finished texts out, everything in this process.

It loads a model, builds a runner for it, and drives an ``EngineCore`` until the caller's requests have ended;
all prompts of a call run together in one continuous batch. Several ``stream`` iterators may be open at once:
each step serves them all and each sees its own updates only. Invariant: when a call ends, for whatever
reason, none of its requests is left running. Threads may share an ``LLM``: a lock around the core lets one of
them step at a time, for all. Read ``engine/core.py`` next.
"""

from __future__ import annotations

import difflib
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from gapless.engine.core import EngineCore
from gapless.engine.detokenizer import TokenizerLike
from gapless.engine.outputs import RequestOutput
from gapless.engine.request import Request
from gapless.engine.step import StepRunner
from gapless.errors import ConfigError, GaplessError, RequestError
from gapless.llm_inputs import (
    Conversation,
    PromptLike,
    as_conversations,
    as_prompts,
    check_conversation,
    failed_output,
    params_for,
    split_prompt,
)
from gapless.llm_media import MEDIA_KEY, Media, make_media_prompt, split_conversation
from gapless.multimodal.items import MediaPrompt
from gapless.sampling.params import SamplingParams

if TYPE_CHECKING:
    from gapless.engine.build import OpenedEngine
    from gapless.multimodal.processor import Processor

ProgressCallback = Callable[[str, int, int], None]
"""Stage, how much is done, how much there is."""
ErrorPolicy = Literal["raise", "return"]


class LLM:
    """A model ready to generate.

    ``model`` is a Hugging Face folder, a GGUF file, ``"smollm2"``, or a config folder with
    ``load_format="dummy"``. An option that is None counts as not given: the ``config`` file, then the
    environment, then the default that ``EngineConfig`` documents. Any other value wins over the file, also
    when it equals the default.
    ``progress`` is called while weights load and graphs are captured. Raises ``ConfigError``, ``ModelError``
    or ``MemoryLimitError``.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | os.PathLike[str] | None = None,
        dtype: str | None = None,
        device: str | None = None,
        load_format: str | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        max_running_requests: int | None = None,
        chunked_prefill_size: int | None = None,
        block_size: int | None = None,
        kv_cache_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_total_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        count_expert_tokens: bool | None = None,
        attention_backend: str | None = None,
        tensor_parallel_size: int | None = None,
        break_at_all_reduce: bool | None = None,
        enforce_eager: bool | None = None,
        enable_vit_cuda_graph: bool | None = None,
        vit_cuda_graph_mode: str | None = None,
        vit_cuda_graph_budgets: Seq[int] | None = None,
        vit_cuda_graph_max_tokens: int | None = None,
        mm_embedding_cache_tokens: int | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        compilation_config: Mapping[str, Any] | None = None,
        cuda_graph_backend_prefill: str | None = None,
        cuda_graph_backend_decode: str | None = None,
        cuda_graph_max_bs_prefill: int | None = None,
        cuda_graph_max_bs_decode: int | None = None,
        cuda_graph_bs_prefill: Seq[int] | None = None,
        cuda_graph_bs_decode: Seq[int] | None = None,
        cuda_graph_tc_compiler: str | None = None,
        progress: ProgressCallback | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(unknown)
        arguments = locals()
        options = {name: arguments[name] for name in _OPTIONS if arguments[name] is not None}
        opened = _open(options, config, progress)
        self._start(
            opened.runner,
            opened.loaded.tokenizer,
            eos_token_ids=opened.loaded.info.eos_token_ids,
            seed=opened.config.seed,
            enable_prefix_caching=opened.config.enable_prefix_caching,
            processor=opened.loaded.processor,
            makes_text=not opened.loaded.info.is_pooling,
        )
        self._model: str | None = opened.config.model

    @classmethod
    def _from_parts(
        cls,
        runner: StepRunner,
        tokenizer: TokenizerLike | None,
        *,
        eos_token_ids: Seq[int] = (),
        seed: int = 0,
        enable_prefix_caching: bool = False,
    ) -> LLM:
        """An engine around a runner that exists already."""
        llm = cls.__new__(cls)
        llm._start(
            runner,
            tokenizer,
            eos_token_ids=eos_token_ids,
            seed=seed,
            enable_prefix_caching=enable_prefix_caching,
        )
        return llm

    def _start(
        self,
        runner: StepRunner,
        tokenizer: TokenizerLike | None,
        *,
        eos_token_ids: Seq[int],
        seed: int,
        enable_prefix_caching: bool,
        processor: Processor | None = None,
        makes_text: bool = True,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.processor = processor
        """Makes prompts of images and videos; None for a model that takes text only."""
        self.core = EngineCore(
            runner,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            seed=seed,
            enable_prefix_caching=enable_prefix_caching,
            makes_text=makes_text,
            favors_throughput=True,
        )
        self._model = None  # known where this object loads it
        self._calls: dict[str, _Call] = {}  # request id → the call it belongs to
        self._num_calls = 0
        self._is_shut_down = False
        # Guards core, calls and inboxes. Reentrant: the collector may end a forgotten stream inside a step.
        self._lock = threading.RLock()

    def generate(
        self,
        prompts: PromptLike | Seq[PromptLike],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        errors: ErrorPolicy = "raise",
    ) -> list[RequestOutput]:
        """Generate for all prompts together; results in the order of the prompts.

        A list of integers is one prompt of token ids. Images and videos come as ``{"prompt": text or ids,
        "multi_modal_data": {"image": [...], "video": [...]}}``: images of Pillow, arrays, paths or bytes, and
        video files or decoded frames, one for each placeholder in the prompt. They must not change before
        this returns.

        ``sampling_params``: one for all or one per prompt. An unusable prompt raises ``RequestError`` before
        anything runs, or with ``errors="return"`` its own result says ``finish_reason="error"`` and the
        others run. What fails later always ends up in the
        result.
        """
        return self._finish(
            self._prepare(as_prompts(prompts), sampling_params, errors=errors, reads_late=True)
        )

    def stream(
        self,
        prompts: PromptLike | Seq[PromptLike],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        errors: ErrorPolicy = "raise",
    ) -> Iterator[RequestOutput]:
        """Like ``generate``, but yields every request's state each time it has grown (the whole text so far).

        ``request_id`` ends in ``-i`` for prompt number ``i``. Closing the iterator aborts what still runs.
        """
        return self._run(self._prepare(as_prompts(prompts), sampling_params, errors=errors), streams=True)

    def chat(
        self,
        messages: Conversation | Seq[Conversation],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        errors: ErrorPolicy = "raise",
    ) -> list[RequestOutput]:
        """``generate`` for one conversation or several, put into the model's chat template.

        A message's content may have parts: ``{"type": "text", "text": ...}``, ``{"type": "image", "image":
        image or path}``, ``{"type": "image_url", "image_url": {"url": "data:..."}}``, and likewise ``video``
        and ``video_url``.
        """
        prompts: list[PromptLike | RequestError] = []
        for conversation in as_conversations(messages):
            try:
                prompts.append(self._render(conversation, add_generation_prompt, chat_template_kwargs))
            except RequestError as error:
                prompts.append(error)
        call = self._prepare(prompts, sampling_params, errors=errors, reads_late=True)
        return self._finish(call)

    def render_chat(
        self,
        messages: Conversation | Seq[Conversation],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PromptLike]:
        """Conversations as prompts for ``generate`` or ``stream``. Raises ``RequestError`` for a malformed
        one."""
        return [
            self._render(conversation, add_generation_prompt, chat_template_kwargs)
            for conversation in as_conversations(messages)
        ]

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend in ``generation_config.json``, over ``SamplingParams``' own
        defaults. Nothing uses it by itself: pass it to ``generate``. Raises ``ConfigError`` for a file that
        cannot be used."""
        from gapless.sampling.generation_config import read_sampling_defaults

        return SamplingParams(
            **({} if self._model is None else read_sampling_defaults("auto", model=self._model))
        )

    def report(self) -> dict[str, Any]:
        """What was captured, which steps replayed which graph, which ran eagerly and why, and how many prompt
        tokens the prefix cache had."""
        return self.core.report()

    def reset_report(self) -> None:
        """Count steps and lookups from now on; what was captured stays in the report."""
        self.core.reset_report()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: after weights were changed in place, or between two runs that are to do
        equal work."""
        with self._lock:
            self.core.reset_prefix_cache()

    def padded_eager(self) -> AbstractContextManager[None]:
        """Within the block every step runs the same kernels on the same padded batch, but without graphs.

        The oracle for graphs: tokens must be identical, since neither shapes nor kernels differ. A prompt
        that ran before starts behind its cached tokens, which is another shape: call ``reset_prefix_cache``
        first.
        """
        return self.runner.padded_eager()

    def shutdown(self) -> None:
        """Abort everything and release graphs and memory. Safe to call twice."""
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
            for request_id in list(self._calls):
                self.core.abort_request(request_id)
            self.runner.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _render(
        self, conversation: Any, add_generation_prompt: bool, template_kwargs: Mapping[str, Any] | None
    ) -> PromptLike:
        if self.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer and so no chat template: pass token ids to generate()"
            )
        check_conversation(conversation)
        messages, media = split_conversation(conversation)
        if media and self.processor is None:
            raise RequestError("this model takes text only: it has no encoder for images and videos")
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **(template_kwargs or {})
        )
        # The template writes the special tokens itself, a leading BOS included.
        token_ids = self.core.intake.encode(text, add_special_tokens=False)
        shown = {MEDIA_KEY: media.to_data()} if media else {}
        return {"prompt": text, "prompt_token_ids": token_ids, **shown}

    def _prepare(
        self,
        prompts: Seq[PromptLike | RequestError],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        *,
        errors: ErrorPolicy,
        reads_late: bool = False,
    ) -> _Call:
        """Check every prompt before anything runs. An error stands for a prompt that could not be made.
        ``reads_late``: the caller waits for the answers, so pixels may be read when they are needed."""
        if errors not in ("raise", "return"):
            raise ConfigError(f'errors={errors!r}: must be "raise" or "return"')
        self._require_running()
        params = params_for(prompts, sampling_params)
        call = _Call()
        with self._lock:
            call_number = self._num_calls
            self._num_calls += 1
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            request_id = f"{call_number}-{index}"
            call.request_ids.append(request_id)
            try:
                source, text, media = split_prompt(prompt)
                if media:
                    text = source if isinstance(source, str) else text
                    source = self._with_media(source, media, reads_late=reads_late)
                call.requests.append(self.core.prepare(request_id, source, param, prompt_text=text))
            except RequestError as error:
                if errors == "raise":
                    where = f"prompt {index}: " if len(prompts) > 1 else ""
                    raise RequestError(f"{where}{error}") from None
                call.inbox.append(failed_output(request_id, prompt, param, str(error)))
        return call

    def _with_media(self, prompt: Any, media: Media, *, reads_late: bool) -> MediaPrompt:
        intake = self.core.intake
        most = min(intake.max_model_len, intake.capacity_tokens) - 1  # at least one token is generated
        return make_media_prompt(self.processor, prompt, media, max_tokens=most, reads_late=reads_late)

    def _finish(self, call: _Call) -> list[RequestOutput]:
        """Run to the end; the last output of every request, in order."""
        latest = {output.request_id: output for output in self._run(call, streams=False)}
        return [latest[request_id] for request_id in call.request_ids]

    def _run(self, call: _Call, *, streams: bool) -> Iterator[RequestOutput]:
        """Step the engine until the call's requests have ended; yield their updates."""
        try:
            with self._lock:
                self._require_running()
                for request in call.requests:
                    self._calls[request.request_id] = call
                    self.core.add(request, streams=streams)
            while (updates := self._next_updates(call)) is not None:
                yield from updates
        finally:
            with self._lock:
                for request in call.requests:
                    if self._calls.pop(request.request_id, None) is not None:
                        self.core.abort_request(request.request_id)

    def _next_updates(self, call: _Call) -> list[RequestOutput] | None:
        """What the call has not seen yet, after a step if that is nothing; None when it is over.

        Somebody else's step, in another thread or between two updates, may have served this call.
        """
        with self._lock:
            if not call.inbox:
                if all(request.request_id not in self._calls for request in call.requests):
                    return None
                self._require_running()
                self._deliver(self.core.step())
                self.core.check()
            updates = list(call.inbox)
            call.inbox.clear()
            return updates

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            call = self._calls.get(output.request_id)
            if call is None:
                continue  # its caller has gone
            call.inbox.append(output)
            if output.finished:
                del self._calls[output.request_id]

    def _require_running(self) -> None:
        if self._is_shut_down:
            raise GaplessError("this LLM has been shut down; make a new one")
        self.core.check()


@dataclass(kw_only=True, slots=True)
class _Call:
    """One ``generate`` or ``stream``: its requests and the updates it has not seen yet."""

    request_ids: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    inbox: deque[RequestOutput] = field(default_factory=deque)


_OPTIONS = tuple(
    name
    for name in inspect.signature(LLM.__init__).parameters
    if name not in ("self", "config", "progress", "unknown")
)
"""Options that go to ``EngineConfig``."""


def _open(
    options: Mapping[str, Any],
    config_file: str | os.PathLike[str] | None,
    progress: ProgressCallback | None,
) -> OpenedEngine:
    from gapless.config import EngineConfig  # these import torch, which takes longer than all the rest
    from gapless.config_sources import read_config_file
    from gapless.engine.build import open_engine
    from gapless.env import read_env

    from_file = {} if config_file is None else read_config_file(config_file)
    env = read_env().engine_options()
    return open_engine(EngineConfig.from_sources(python=options, config_file=from_file, env=env), progress)


def _refuse_unknown(unknown: Mapping[str, Any]) -> None:
    if not unknown:
        return
    name = next(iter(unknown))
    close = difflib.get_close_matches(name, [*_OPTIONS, "config", "progress"], n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"LLM() has no option {name}={unknown[name]!r}{hint}")
