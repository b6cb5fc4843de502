"""Tokenizers against recorded token ids; chat templates; prompt files."""

import dataclasses
import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dspark_jax.text import TextError, Tokenizer, read_prompts, tokenizer_from_folder, tokenizer_from_gguf

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", "<gh_stars>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "Hello, world!  Two  spaces.\n\n\ttabs 12345 and 3.14",
    "naïve café — 東京 🚀 Ünïcödé",
    "def f(x):\n    return x ** 2\n",
    "  leading and trailing  ",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_files) -> Tokenizer:
    assert smollm2_files.tokenizer is not None
    return smollm2_files.tokenizer


def gguf_fields(pre: str = "smollm", **changes) -> dict:
    """Metadata of a small byte-level tokenizer; merges join "1 2" so that the digit split shows."""
    tokens = [*CONTROL, *BYTES, "12", "he", "hel", "<think>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(BYTES) + 3) + [4],
        "tokenizer.ggml.merges": ["1 2", "h e", "he l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    fields |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in fields.items() if value is not None}


def with_template(template: str | None) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(gguf_fields())
    return Tokenizer(tokenizer.backend, 1, (2,), 2, template)


# --- the real model ------------------------------------------------------------------------------


def test_token_ids_are_those_recorded(smollm2, smollm2_reference):
    for record in smollm2_reference["records"]:
        assert smollm2.encode(record["prompt"]) == record["prompt_token_ids"]
        assert smollm2.decode(record["greedy_token_ids"]) == record["greedy_text"]


def test_rendered_chat_is_that_recorded(smollm2, smollm2_reference):
    chats = [record for record in smollm2_reference["records"] if record["kind"] == "chat"]
    assert chats
    for record in chats:
        assert smollm2.render_chat([{"role": "user", "content": record["user_text"]}]) == record["prompt"]
        assert smollm2.encode_chat(record["user_text"]) == record["prompt_token_ids"]


def test_real_control_tokens(smollm2):
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.pad_id, smollm2.vocab_size) == (1, (2,), 2, 49152)
    mask = smollm2.unused_control_token()
    assert smollm2.decode([mask]) in ("<repo_name>", "<reponame>", "<file_sep>", "<gh_stars>")
    assert smollm2.decode([mask], skip_special=True) == ""
    assert len(smollm2.chat_template_hash) == 16


@pytest.mark.parametrize("text", TEXTS)
def test_real_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


# --- GGUF metadata -------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(pre, text):
    tokenizer = tokenizer_from_gguf(gguf_fields(pre))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_digits_are_split_before_merges(pre):
    tokenizer = tokenizer_from_gguf(gguf_fields(pre))
    vocab = tokenizer.backend.get_vocab()
    assert tokenizer.encode("12") == [vocab["1"], vocab["2"]]
    assert tokenizer.encode("hel") == [vocab["hel"]]


def test_qwen2_normalises_to_nfc():
    tokenizer = tokenizer_from_gguf(gguf_fields("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_control_tokens_are_recognised_and_never_added():
    tokenizer = tokenizer_from_gguf(gguf_fields())
    ids = tokenizer.encode("<|im_start|>h<|im_end|><think>")
    assert ids[0] == 1
    assert ids[2] == 2
    assert len(ids) == 4
    # Control tokens (type 3) are special; user-defined ones (type 4) are text that is kept.
    assert tokenizer.decode(ids, skip_special=True) == "h<think>"
    assert len(tokenizer.encode("h")) == 1
    assert tokenizer.encode("") == []


def test_unused_control_token_avoids_tokens_in_use():
    tokenizer = tokenizer_from_gguf(gguf_fields())
    assert tokenizer.unused_control_token() == CONTROL.index("<file_sep>")
    in_template = Tokenizer(tokenizer.backend, 1, (2, 0), 2, TEMPLATE + "<file_sep>")
    assert in_template.unused_control_token() == CONTROL.index("<gh_stars>")
    assert Tokenizer(tokenizer.backend, 1, (2, 0, 3, 4), 2, TEMPLATE).unused_control_token() is None


def test_unused_control_token_prefers_reserved_ones():
    names = ["<a>", "<b>", "<c>", "<d>", "<|reserved_special_token_0|>"]
    tokens = [*names, *BYTES]
    fields = gguf_fields(tokens=tokens, token_type=[3] * 5 + [1] * len(BYTES), merges=[])
    assert tokenizer_from_gguf(fields).unused_control_token() == 4


def test_every_stop_token_is_read():
    assert tokenizer_from_gguf(gguf_fields(eot_token_id=0)).eos_ids == (2, 0)


def test_padding_falls_back_on_the_stop_token():
    assert tokenizer_from_gguf(gguf_fields(padding_token_id=None)).pad_id == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "llama-bpe"}, r"tokenizer.ggml.pre = 'llama-bpe': supported are 'smollm', 'qwen2'"),
        ({"pre": None}, r"tokenizer.ggml.pre = None"),
        ({"model": "llama"}, r"tokenizer.ggml.model = 'llama': only 'gpt2'"),
        ({"merges": None, "token_type": None}, r"lacks tokenizer.ggml.token_type, tokenizer.ggml.merges"),
        ({"token_type": [1]}, r"tokenizer.ggml.token_type 1: they must agree"),
        ({"merges": ["zz zz"]}, r"tokenizer.ggml.merges don't fit"),
        ({"bos_token_id": "one"}, r"tokenizer.ggml.bos_token_id = 'one'"),
    ],
)
def test_unusable_metadata(changes, message):
    with pytest.raises(TextError, match=message):
        tokenizer_from_gguf(gguf_fields(**changes))


def test_repeated_tokens():
    fields = gguf_fields()
    fields["tokenizer.ggml.tokens"][-1] = "he"
    with pytest.raises(TextError, match="repeats 1 tokens"):
        tokenizer_from_gguf(fields)


# --- chat templates ------------------------------------------------------------------------------


def test_template_environment_is_that_of_published_templates():
    template = (
        "{% for message in messages %}\n"
        "    {% if message['role'] == 'skip' %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ message['content'] | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ eos_token }}{{ strftime_now('%Y') | length }}{{ thinking }}{{ tools is none }}"
    )
    messages = [{"role": "skip", "content": "a"}, {"role": "user", "content": "<é> & 'x'"}]
    rendered = with_template(template).render_chat(messages, thinking=True)
    # trim_blocks and lstrip_blocks remove the lines that hold only blocks; tojson escapes neither HTML nor é.
    assert rendered == "\"<é> & 'x'\"<|im_end|>4TrueTrue"


def test_generation_prompt_is_the_default():
    tokenizer = tokenizer_from_gguf(gguf_fields())
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages).endswith("<|im_start|>assistant\n")
    assert "assistant" not in tokenizer.render_chat(messages, add_generation_prompt=False)
    assert (
        tokenizer.encode_chat("hi")
        == tokenizer.encode_chat(messages)
        == tokenizer.encode(tokenizer.render_chat(messages))
    )


def test_thinking_switch():
    """The template hears of it only if it is set; the hash tells the modes apart, and stays as it was without one."""
    template = "{% if enable_thinking is not false %}think: {% endif %}{{ messages[0]['content'] }}"
    tokenizer, messages = with_template(template), [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "think: hi"
    assert tokenizer.render_chat(messages, enable_thinking=False) == "hi"
    assert tokenizer.encode_chat("hi", enable_thinking=False) == tokenizer.encode("hi")
    off, on = (dataclasses.replace(tokenizer, enable_thinking=switch) for switch in (False, True))
    assert (off.render_chat(messages), on.render_chat(messages)) == ("hi", "think: hi")
    assert off.render_chat(messages, enable_thinking=True) == "think: hi"
    assert len({t.chat_template_hash for t in (tokenizer, off, on)}) == 3


def test_template_hash_follows_the_text():
    assert with_template("a").chat_template_hash == "ca978112ca1bbdca"
    assert with_template("b").chat_template_hash != with_template("a").chat_template_hash
    assert with_template(None).chat_template_hash == ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages .*roles must alternate"),
        ("{% if %}", "the chat template refused"),
        ("{{ messages.append(1) }}", "the chat template refused"),  # The sandbox: messages are immutable.
        ("{{ ''.__class__.__mro__ }}", "the chat template refused"),
        (None, "no chat template"),
    ],
)
def test_templates_that_refuse(template, message):
    with pytest.raises(TextError, match=message):
        with_template(template).render_chat([{"role": "user", "content": "hi"}])


# --- folders -------------------------------------------------------------------------------------


def write_folder(folder, **files):
    """Writes a tokenizer of single bytes and control tokens, and `files` as JSON by stem."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(CONTROL + BYTES)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROL)
    backend.enable_padding(length=64)
    backend.enable_truncation(2)
    backend.save(str(folder / "tokenizer.json"))
    for stem, values in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(values))


def test_folder(tmp_path):
    write_folder(
        tmp_path,
        tokenizer_config={
            "bos_token": None,
            "eos_token": {"content": "<|im_end|>"},
            "pad_token": "<|endoftext|>",
            "chat_template": "from the config",
        },
        generation_config={"eos_token_id": [2, 0], "bos_token_id": 1},
        config={"eos_token_id": 4},
    )
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2, 0), 0)
    assert tokenizer.chat_template == "from the config"
    # Stored padding and truncation don't apply.
    assert len(tokenizer.encode("abcdef")) == 6
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert tokenizer_from_folder(tmp_path).chat_template == TEMPLATE


def test_folder_with_little_in_it(tmp_path):
    write_folder(tmp_path, config={"eos_token_id": 2})
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.chat_template) == (None, (2,), 2, None)


def test_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert tokenizer_from_folder(tmp_path).chat_template == "d"
    write_folder(tmp_path, tokenizer_config={"chat_template": named[:1]})
    with pytest.raises(TextError, match="chat templates tool_use but none named 'default'"):
        tokenizer_from_folder(tmp_path)


def test_unusable_folders(tmp_path):
    with pytest.raises(TextError, match=r"no tokenizer.json"):
        tokenizer_from_folder(tmp_path)
    write_folder(tmp_path, tokenizer_config={"eos_token": "<nowhere>"})
    with pytest.raises(TextError, match=r"'<nowhere>' that tokenizer.json doesn't have"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TextError, match="expected a JSON object"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TextError, match="is not JSON"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match="can't be read"):
        tokenizer_from_folder(tmp_path)


# --- prompt files --------------------------------------------------------------------------------


def test_prompt_forms(tmp_path):
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "three"}]
    rows = [
        {"turns": ["one", "ignored"], "id": 7},
        {"prompt": "two\u2028still two"},
        {"messages": messages},
    ]
    # U+2028 unescaped: not a line end in JSONL. The file starts with a byte order mark.
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n  \n", encoding="utf-8-sig")
    assert read_prompts(file) == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two\u2028still two"}],
        messages,
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"not JSON .* got 'not json'"),
        ('["a"]', r"expected an object, got \['a'\]"),
        ('{"text": "a"}', r"exactly one of turns, prompt and messages, got \{'text': 'a'\}"),
        ('{"prompt": "a", "turns": ["b"]}', r"exactly one of turns"),
        ('{"turns": []}', r"turns must be a non-empty list, got \[\]"),
        ('{"turns": "a"}', r"turns must be a non-empty list, got 'a'"),
        ('{"turns": ["", "b"]}', r"text of turns must be a non-empty string, got ''"),
        ('{"prompt": "  "}', r"text of prompt must be a non-empty string, got '  '"),
        ('{"prompt": 3}', r"text of prompt must be a non-empty string, got 3"),
        ('{"messages": []}', r"messages must be a non-empty list, got \[\]"),
        ('{"messages": ["a"]}', r"a message needs a role and a content"),
        ('{"messages": [{"role": "user", "content": ""}]}', r"a message needs a role and a content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', r"the last message must be the user's"),
    ],
)
def test_malformed_prompt(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(TextError, match=message) as raised:
        read_prompts(file)
    assert f"{file}, line 3:" in str(raised.value)
    assert '{"turns": ["text", ...]}' in str(raised.value)


def test_prompt_files_without_prompts(tmp_path):
    with pytest.raises(TextError, match=r"nowhere.jsonl can't be read"):
        read_prompts(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TextError, match="holds no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(TextError, match=r"latin.jsonl can't be read"):
        read_prompts(tmp_path / "latin.jsonl")
