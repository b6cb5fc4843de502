"""Text in and out of the models: tokenizer, chat template, files of prompts.

A `Tokenizer` is read from a Hugging Face folder or from the metadata of a GGUF file. Its chat template is
part of what a drafter was trained on, so it has a hash (`Tokenizer.chat_template_hash`) that travels with
the drafter's weights.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

Message = dict[str, Any]

# Token types of `tokenizer.ggml.token_type` (GGUF specification).
_GGUF_CONTROL = 3
_GGUF_USER_DEFINED = 4

# Qwen2's and Qwen3's split of text into words, from their published tokenizer.json.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PROMPT_FORMS = (
    '{"turns": ["text", ...]} (the first turn is used), {"prompt": "text"} or'
    ' {"messages": [{"role": "user", "content": "text"}, ...]}'
)


class TextError(ValueError):
    """A tokenizer, chat template or prompt file that can't be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with the control tokens and the chat template of its model.

    Attributes:
      backend: The `tokenizers` pipeline that does the work.
      bos_id: Token that starts a text; never added by `encode`, templates write it where it belongs.
      eos_ids: Every token that ends an answer, the tokenizer's own first.
      pad_id: Token that fills the unused end of a row.
      chat_template: Jinja text that turns messages into a prompt.
      unk_id: Token of unknown text; no byte-level tokenizer ever produces it.
      enable_thinking: What templates that know the variable are told (Qwen3); None = nothing, their own default.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int
    chat_template: str | None = None
    unk_id: int | None = None
    enable_thinking: bool | None = None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the embedding table may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template_hash(self) -> str:
        """Short hash of the chat template's text and of the thinking switch if it is set, "" without a template."""
        if self.chat_template is None:
            return ""
        switch = "" if self.enable_thinking is None else f"\nenable_thinking={self.enable_thinking}"
        return hashlib.sha256((self.chat_template + switch).encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`; control tokens written in it are recognised, none is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Returns the text of `ids`, control tokens left out if `skip_special`."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)

    def render_chat(self, messages: Sequence[Message], **template_kwargs: Any) -> str:
        """Returns the prompt that the chat template makes of `messages`.

        Args:
          messages: The conversation, `{"role": ..., "content": ...}` each.
          **template_kwargs: Variables for the template; `add_generation_prompt` is True unless given, and
            `enable_thinking` as the tokenizer has it.

        Raises:
          TextError: there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise TextError("this tokenizer has no chat template: encode plain text, or load a chat model's tokenizer")
        variables = {
            "messages": list(messages),
            "add_generation_prompt": True,
            "bos_token": self._token_text(self.bos_id),
            "eos_token": self._token_text(self.eos_ids[0] if self.eos_ids else None),
            "pad_token": self._token_text(self.pad_id),
            "unk_token": self._token_text(self.unk_id),
            "tools": None,
            "documents": None,
        }
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        try:
            return _compile_template(self.chat_template).render(variables | template_kwargs)
        except (jinja2.TemplateError, TypeError) as error:
            raise TextError(f"the chat template refused the messages {_shorten(messages)}: {error}") from error

    def encode_chat(self, user_text_or_messages: str | Sequence[Message], **template_kwargs: Any) -> list[int]:
        """Returns the token ids of a rendered conversation; a string is one turn of the user. See `render_chat`."""
        if isinstance(user_text_or_messages, str):
            user_text_or_messages = [{"role": "user", "content": user_text_or_messages}]
        return self.encode(self.render_chat(user_text_or_messages, **template_kwargs))

    def unused_control_token(self) -> int | None:
        """Returns a control token that neither ordinary text nor the chat template ever produces.

        It can be the drafter's mask token: its embedding means nothing else to the drafter. Tokens that a
        vocabulary reserves for such use are preferred, then the lowest id. None if there is no such token.
        """
        taken = {self.bos_id, self.pad_id, self.unk_id, *self.eos_ids}
        template = self.chat_template or ""
        free = {
            token_id: token.content
            for token_id, token in sorted(self.backend.get_added_tokens_decoder().items())
            if token.special and token_id not in taken and token.content not in template
        }
        reserved = (
            i for i, text in free.items() if any(word in text.lower() for word in ("reserved", "unused", "mask"))
        )
        return next(reserved, next(iter(free), None))

    def _token_text(self, token_id: int | None) -> str:
        text = None if token_id is None else self.backend.id_to_token(token_id)
        return text or ""


def tokenizer_from_folder(path: str | Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    `tokenizer.json` is required. `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and
    `config.json` are read if they are there. Stop tokens are the tokenizer's own and those of the generation
    config (of the model's config if there is no generation config).

    Raises:
      TextError: `tokenizer.json` is missing or a file can't be read.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TextError(
            f"no tokenizer.json in {folder}: only fast tokenizers are read; write one with"
            " AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The backend raises bare `Exception`.
        raise TextError(f"{file} can't be read ({error}): fetch it again, or update the tokenizers package") from error
    backend.no_padding()
    backend.no_truncation()
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    model = _read_json(folder / "config.json")

    def own(name: str) -> list[int]:
        return _token_ids(backend, config.get(name), folder)

    def declared(name: str) -> list[int]:
        value = generation.get(name)
        return _as_ids(model.get(name) if value is None else value, f"{folder}: {name}")

    return _make_tokenizer(
        backend,
        bos=own("bos_token") or declared("bos_token_id"),
        eos=own("eos_token") + declared("eos_token_id"),
        pad=own("pad_token") or declared("pad_token_id"),
        unk=own("unk_token"),
        chat_template=_folder_template(folder, config),
    )


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the metadata of a GGUF file describes.

    Args:
      fields: Metadata values by key, such as `fields["tokenizer.ggml.tokens"]`.

    Raises:
      TextError: a kind of tokenizer that is not supported, or metadata is missing.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TextError(
            f"tokenizer.ggml.model = {kind!r}: only 'gpt2' (byte-level BPE) is supported;"
            " use the model's Hugging Face folder instead"
        )
    pre = fields.get("tokenizer.ggml.pre")
    if pre not in _GGUF_PRE:
        raise TextError(
            f"tokenizer.ggml.pre = {pre!r}: supported are {', '.join(map(repr, _GGUF_PRE))};"
            " use the model's Hugging Face folder instead"
        )
    missing = [key for key in ("tokens", "token_type", "merges") if f"tokenizer.ggml.{key}" not in fields]
    if missing:
        raise TextError(
            f"the metadata lacks {', '.join('tokenizer.ggml.' + key for key in missing)}: convert the model again"
        )
    tokens = list(fields["tokenizer.ggml.tokens"])
    types = list(fields["tokenizer.ggml.token_type"])
    if len(tokens) != len(types):
        raise TextError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries and tokenizer.ggml.token_type {len(types)}:"
            " they must agree; convert the model again"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TextError(f"tokenizer.ggml.tokens repeats {len(tokens) - len(vocab)} tokens: convert the model again")
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # The backend raises bare `Exception`.
        raise TextError(f"tokenizer.ggml.merges don't fit the tokens ({error}): convert the model again") from error
    _GGUF_PRE[pre](backend)
    backend.decoder = decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind == _GGUF_CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED)
    ]
    # One call for both kinds: control tokens keep `special=True`.
    backend.add_tokens(added)

    def ids(*names: str) -> list[int]:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
        return [token for key in keys for token in _as_ids(fields.get(key), key)]

    return _make_tokenizer(
        backend,
        bos=ids("bos"),
        eos=ids("eos", "eot", "eom"),
        pad=ids("padding"),
        unk=ids("unknown"),
        chat_template=fields.get("tokenizer.chat_template"),
    )


def read_prompts(path: str | Path) -> list[list[Message]]:
    """Reads a JSONL file of prompts as conversations for `Tokenizer.encode_chat`.

    Every line is an object with exactly one of `turns` (the first turn is used), `prompt` or `messages`; other
    keys are ignored, and so are blank lines.

    Raises:
      TextError: the file is missing or empty, or a line is malformed; file, line and value are named.
    """
    try:
        # utf-8-sig: some editors write a byte order mark.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(
            f"prompt file {path} can't be read ({error}): name a UTF-8 JSONL file, one {_PROMPT_FORMS} a line"
        ) from error
    prompts = [_parse_prompt(line, f"{path}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise TextError(f"prompt file {path} holds no prompts: write one {_PROMPT_FORMS} a line")
    return prompts


# --- prompts -------------------------------------------------------------------------------------


def _parse_prompt(line: str, where: str) -> list[Message]:
    def refuse(problem: str, value: object) -> TextError:
        return TextError(f"{where}: {problem}, got {_shorten(value)}; each line is {_PROMPT_FORMS}")

    try:
        row = json.loads(line)
    except ValueError as error:
        raise refuse(f"not JSON ({error})", line) from error
    if not isinstance(row, dict):
        raise refuse("expected an object", row)
    forms = [form for form in ("turns", "prompt", "messages") if form in row]
    if len(forms) != 1:
        raise refuse("expected exactly one of turns, prompt and messages", row)
    value = row[forms[0]]
    if forms[0] == "messages":
        if not isinstance(value, list) or not value:
            raise refuse("messages must be a non-empty list", value)
        for message in value:
            if not isinstance(message, dict) or not all(_is_text(message.get(key)) for key in ("role", "content")):
                raise refuse("a message needs a role and a content that are non-empty text", message)
        if value[-1]["role"] != "user":
            raise refuse("the last message must be the user's, its answer is generated", value[-1])
        return [{"role": message["role"], "content": message["content"]} for message in value]
    if forms[0] == "turns":
        if not isinstance(value, list) or not value:
            raise refuse("turns must be a non-empty list", value)
        value = value[0]
    if not _is_text(value):
        raise refuse(f"the text of {forms[0]} must be a non-empty string", value)
    return [{"role": "user", "content": value}]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _shorten(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


# --- chat templates ------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which only marks the assistant's text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Returns the body, in a scope of its own."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=8)
def _compile_template(template: str) -> jinja2.Template:
    """Compiles in the environment that published chat templates are written for (that of Hugging Face)."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # Jinja's own filter escapes HTML, which a prompt must not.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(template)


def _folder_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # Several named templates.
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise TextError(
                f"{folder}: chat templates {', '.join(named) or 'none'} but none named 'default':"
                " save the one to use as chat_template.jinja"
            )
        template = named["default"]
    return template


# --- tokenizers ----------------------------------------------------------------------------------


def _split_smollm(backend: tokenizers.Tokenizer) -> None:
    """Splits every digit off, then words with GPT-2's pattern."""
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _split_qwen2(backend: tokenizers.Tokenizer) -> None:
    """Normalises to NFC and splits words with Qwen2's pattern."""
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GGUF_PRE: dict[str, Callable[[tokenizers.Tokenizer], None]] = {"smollm": _split_smollm, "qwen2": _split_qwen2}


def _make_tokenizer(
    backend: tokenizers.Tokenizer,
    bos: list[int],
    eos: list[int],
    pad: list[int],
    unk: list[int],
    chat_template: str | None,
) -> Tokenizer:
    """Builds the record; the padding falls back on a stop token, on bos, on 0: padded places are never read."""
    return Tokenizer(
        backend=backend,
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(dict.fromkeys(eos)),
        pad_id=[*pad, *eos, *bos, 0][0],
        chat_template=chat_template,
        unk_id=unk[0] if unk else None,
    )


def _token_ids(backend: tokenizers.Tokenizer, token: Any, folder: Path) -> list[int]:
    """Returns the id of a token of `tokenizer_config.json`: text, `{"content": text}` or nothing."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is None:
        return []
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise TextError(f"{folder}: tokenizer_config.json names the token {text!r} that tokenizer.json doesn't have")
    return [token_id]


def _as_ids(value: Any, where: str) -> list[int]:
    """Returns a declared id, list of ids or nothing as a list."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in values):
        raise TextError(f"{where} = {value!r}: expected a token id or a list of them")
    return values


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in `file`, an empty one if there is no file."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{file} is not JSON ({error}): fetch it again") from error
    if not isinstance(values, dict):
        raise TextError(f"{file}: expected a JSON object, got {_shorten(values)}")
    return values
