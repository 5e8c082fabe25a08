"""The chat template of a vision-language folder: its own, wherever it lies, or a plain one.

Such a folder's template writes the placeholders of images and videos. Processors used to keep theirs in
``chat_template.json``, which tokenizers never read; folders without weights often have none. The plain one is
ChatML with a placeholder for each content part of type ``image``, ``image_url``, ``video`` or ``video_url``.
Read ``tokenizer.py`` for who asks.
"""

from __future__ import annotations

from pathlib import Path

from gapless.errors import ModelError
from gapless.models.json_file import read_json
from gapless.models.vl_config import is_vision_language

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}"
    "{% if part.type in ('image', 'image_url') %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part.type in ('video', 'video_url') %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif part.type == 'text' %}{{ part.text }}"
    "{% else %}{{ raise_exception('content parts of type ' + part.type|string + ' are unknown') }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def template_of_folder(folder: Path, of_tokenizer: str | None) -> str | None:
    """``of_tokenizer``: what the tokenizer's files say, which decides for models without vision. Raises
    ``ModelError``."""
    config = folder / "config.json"
    if not config.is_file() or not is_vision_language(read_json(config)):
        return of_tokenizer
    path = folder / "chat_template.json"
    if path.is_file():
        template = read_json(path).get("chat_template")
        if not isinstance(template, str):
            raise ModelError(f"{path}: 'chat_template'={template!r} must be a string")
        return template
    return of_tokenizer if of_tokenizer is not None else PLAIN_TEMPLATE
