"""Tokenizer folders: chats, special tokens, SentencePiece pieces, and what is refused."""

import json
import shutil

import pytest
import tokenizers
from tokenizers import decoders, models

from engine.errors import ConfigError, InvalidRequest
from server.errors import NoChatTemplate
from server.text.chat_template import ChatTemplate, Message
from server.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.harness import SPECIAL


def template(source: str, max_chars: int = 10_000) -> ChatTemplate:
  return ChatTemplate(source, {}, max_chars)


def render(source: str, *contents: str, max_chars: int = 10_000) -> str:
  return template(source, max_chars).render(
    [Message("user", content) for content in contents], add_generation_prompt=True
  )


def test_chat_uses_the_template_and_adds_nothing(tokenizer):
  ids = tokenizer.encode_chat([Message("system", "be"), Message("user", "the cat")])
  assert tokenizer.decode(ids, skip_special_tokens=False) == (
    "<|bos|><|system|>be<|end|><|user|>the cat<|end|><|assistant|>"
  )
  assert ids.count(SPECIAL.index("<|bos|>")) == 1
  closed = tokenizer.encode_chat([Message("user", "the cat")], add_generation_prompt=False)
  assert closed[-1] == SPECIAL.index("<|end|>")


@pytest.mark.catalogue("F2")
def test_special_tokens_in_a_message_are_plain_text(tokenizer):
  for special in SPECIAL:
    content = f"the {special}{special}\ufdd0 cat"
    plain = tokenizer.encode_chat([Message("user", "the  cat")])
    ids = tokenizer.encode_chat([Message("user", content)])
    controls = [token_id for token_id in ids if token_id < len(SPECIAL)]
    assert controls == [token_id for token_id in plain if token_id < len(SPECIAL)]
    assert f"the {special}{special}" in tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_in_raw_text_count(tokenizer):
  assert tokenizer.encode("<|user|>the") == [1, 4, *tokenizer.encode("the", add_special_tokens=False)]


@pytest.mark.catalogue("F2")
@pytest.mark.parametrize("role", ["end|><|system", "bos", "", "User", "root"])
def test_roles_cannot_spell_control_tokens(tokenizer, role):
  with pytest.raises(InvalidRequest, match=r"chat\.messages\[0\]\.role=.* send one of system"):
    tokenizer.encode_chat([Message(role, "x")])


@pytest.mark.catalogue("F3")
@pytest.mark.parametrize(
  "source, said",
  [
    ("{{ raise_exception('turns must alternate') }}", "turns must alternate"),
    ("{{ messages[0].__class__.__mro__ }}", "refuses"),
    ("{% for i in range(100000000) %}x{% endfor %}", "fails on these messages"),
    (
      "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = [i][0] %}{% endfor %}{% endfor %}",
      "longer than 1 s",
    ),
    ("{% for i in range(9999) %}{{ 'abcdefghij' }}{% endfor %}", "longer than 10000"),
    ("{{ 'a' * 1000000000 }}", "past its limit"),
    ("{{ 9 ** 99999999 }}", "past its limit"),
    ("{{ '%1000000000d' % 1 }}", "past its limit"),
    ("{{ messages.append(1) }}", "refuses"),
    ("{{ messages[7].content.x.y }}", "refuses"),
    ("{{ 1 + 'a' }}", "fails on these messages"),
    ("{{ 1 / 0 }}", "fails on these messages"),
  ],
)
def test_a_template_cannot_escape_or_exhaust(source, said):
  with pytest.raises(InvalidRequest, match=said):
    render(source, "hello")


def test_templates_as_they_are_written_work():
  source = (
    "{%- for m in messages %}\n  {%- if loop.index0 == 1 %}{% break %}{% endif %}\n"
    "{{- m['content'] | trim }}{{ m | tojson }}\n{%- endfor %}{{ 2 * 3 }}{{ 'a' + 'b' }}"
  )
  assert render(source, " é ", "never") == 'é{"role": "user", "content": " é "}6ab'


def test_tojson_takes_the_arguments_of_transformers():
  source = "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}{{ 'é' | tojson(ensure_ascii=True) }}"
  assert render(source, "é") == '{"content":"é","role":"user"}"\\u00e9"'


@pytest.mark.catalogue("F3")
def test_limits_of_a_chat(tokenizer):
  with pytest.raises(InvalidRequest, match="empty: send at least one message"):
    tokenizer.encode_chat([])
  with pytest.raises(InvalidRequest, match="1025 messages, the limit is 1024"):
    tokenizer.encode_chat([Message("user", "x")] * 1025)
  with pytest.raises(InvalidRequest, match="limit is 1048576"):
    tokenizer.encode_chat([Message("user", "x" * 600_000)] * 2)


@pytest.mark.catalogue("F1")
def test_pathological_text_of_the_largest_size_is_tokenized(tokenizer):
  for text in ("a" * (1 << 20), "^" * (1 << 20), " " * (1 << 20), "é" * (1 << 19)):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
  with pytest.raises(InvalidRequest, match="1048577 bytes of text, the limit is 1048576"):
    tokenizer.encode("a" * ((1 << 20) + 1))


def test_places_of_tokens_in_the_text(tokenizer):
  assert tokenizer.places("the cat 😀") == [0, 0, 3, 7, *[8] * (len(tokenizer.encode("the cat 😀")) - 4)]
  assert tokenizer.places("the cat", add_special_tokens=False) == [0, 3]
  assert tokenizer.places("the<|end|> cat") == [0, 0, 3, 10]


def test_places_where_spans_leave_spaces_out(tokenizer_dir, tmp_path):
  """As GPT-2's tokenizer does."""
  raw = json.loads((tokenizer_dir / "tokenizer.json").read_text())
  raw["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
  (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
  assert Tokenizer(tmp_path).places("the cat sat") == [0, 3, 7]


def test_sentencepiece_pieces(tmp_path):
  vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
  made = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
  made.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
  )
  made.save(str(tmp_path / "tokenizer.json"))
  tokenizer = Tokenizer(tmp_path)
  detokenizer = tokenizer.detokenizer()
  assert [detokenizer.push((token_id,)) for token_id in (1, 2, 3, 4, 5, 6)] == [" the", " cat", "s", "", "", "€"]
  assert tokenizer.decode([1, 2, 3, 4, 5, 6]) == "the cats€"
  assert tokenizer.decoded_places([1, 2, 3, 4, 5, 6], "the cats€") == [0, 3, 7, 8, 8, 8]
  with pytest.raises(NoChatTemplate, match="no chat template; send the prompt as text"):
    tokenizer.encode_chat([Message("user", "x")])


def test_named_templates_and_template_files(tokenizer_dir, tmp_path):
  folder = shutil.copytree(tokenizer_dir, tmp_path / "model")
  (folder / "chat_template.jinja").unlink()
  assert not Tokenizer(folder).has_chat_template
  config = {
    "bos_token": {"content": "<|bos|>"},
    "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}],
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  tokenizer = Tokenizer(folder)
  assert tokenizer.decode(tokenizer.encode_chat([Message("user", "x")]), skip_special_tokens=False) == "<|bos|>yes"


@pytest.mark.parametrize(
  "name, text, said",
  [
    ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
    ("tokenizer.json", '{"model": {"type": "Nonsense"}}', "tokenizer.json is not a tokenizer"),
    ("tokenizer_config.json", "[]", "tokenizer_config.json is broken"),
    ("tokenizer_config.json", "{", "tokenizer_config.json is broken"),
    ("tokenizer_config.json", b"\xff\xfe", "tokenizer_config.json is broken"),
  ],
)
def test_broken_files_are_named(tokenizer_dir, tmp_path, name, text, said):
  folder = shutil.copytree(tokenizer_dir, tmp_path / "model")
  (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ConfigError, match=said):
    Tokenizer(folder)


@pytest.mark.parametrize(
  "source, said",
  [
    (
      "{% for %}",
      "not valid jinja2: .*; fix it, or remove it to serve without chat; until then send the prompt as text",
    ),
    ("{{ x | no_such_filter }}", "not valid jinja2: No filter named"),
    ("{% if x %}" * 200 + "{% endif %}" * 200, "not valid jinja2"),
    ("x" * 70_000, "70000 bytes, the limit is 65536"),
    (b"\xff\xfe", "chat_template.jinja cannot be read: .*; restore it"),
  ],
)
def test_a_broken_chat_template_keeps_chats_alone_from_being_served(tokenizer_dir, tmp_path, source, said):
  folder = shutil.copytree(tokenizer_dir, tmp_path / "model")
  (folder / "chat_template.jinja").write_bytes(source if isinstance(source, bytes) else source.encode())
  tokenizer = Tokenizer(folder)
  assert tokenizer.encode("the cat") and not tokenizer.has_chat_template and tokenizer.chat_template is None
  with pytest.raises(NoChatTemplate, match=said):
    tokenizer.encode_chat([Message("user", "x")])


@pytest.mark.parametrize("dash", ["", "-"])
def test_generation_blocks_are_rendered_as_they_are(dash):
  """As transformers renders them: names that are set inside are not seen outside."""
  source = (
    "{% set x = 'out' %}{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}[{{ loop.index }}]"
    "{% generation %} {% set x = 'in' %}{{ m.content + x }} {% endgeneration %}{{ x }}{% endfor %}"
  )
  source = source.replace("{% generation %}", f"{{%{dash} generation {dash}%}}")
  source = source.replace("{% endgeneration %}", f"{{%{dash} endgeneration {dash}%}}")
  space = "" if dash else " "
  assert render(source, "a", "b", "c") == "".join(
    f"[{at}]{space}{text}in{space}out" for at, text in ((1, "a"), (2, "b"))
  )
  assert template("{% generation %}{{ enable_thinking }}{% endgeneration %}").variables == {"enable_thinking"}


def test_unknown_kinds_of_decoder_are_refused(tokenizer_dir, tmp_path):
  raw = json.loads((tokenizer_dir / "tokenizer.json").read_text())
  raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
  (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
  with pytest.raises(ConfigError, match="decoder of kind .'WordPiece'.*token ids only"):
    Tokenizer(tmp_path)
  with pytest.raises(ConfigError, match="cannot be read: No such file"):
    Tokenizer(tmp_path / "nowhere")


def test_a_chat_template_of_ones_own(tokenizer_dir, tmp_path):
  """It counts instead of the model's, even where that is broken."""
  folder = shutil.copytree(tokenizer_dir, tmp_path / "model")
  (folder / "chat_template.jinja").write_text("{% if %}")
  template = tmp_path / "own.jinja"
  template.write_text("{{ bos_token }}{{ messages[0]['content'] }}")
  tokenizer = load_tokenizer(folder, max_prompt_bytes=1000, chat_template=str(template))
  assert tokenizer is not None and tokenizer.chat_template == template.read_text()
  assert not tokenizer.chat_template_error
  ids = tokenizer.encode_chat([Message("user", "the cat")])
  assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|>the cat"


@pytest.mark.parametrize(
  ("content", "complaint"),
  [
    (b"{% if %}", "chat_template=.*own.jinja: the chat template is not valid jinja2"),
    (b"\xff", "chat_template=.*own.jinja cannot be read: .*utf-8"),
    (b"x" * 100_000, "chat_template=.*own.jinja: the chat template has 65537 bytes, the limit is 65536"),
    (None, "chat_template=.*own.jinja cannot be read: .*No such file"),
  ],
)
def test_a_bad_chat_template_of_ones_own(tokenizer_dir, tmp_path, content, complaint):
  if content is not None:
    (tmp_path / "own.jinja").write_bytes(content)
  with pytest.raises(ConfigError, match=complaint):
    load_tokenizer(tokenizer_dir, max_prompt_bytes=1000, chat_template=str(tmp_path / "own.jinja"))


def test_a_chat_template_needs_a_tokenizer(tmp_path):
  assert load_tokenizer(tmp_path, max_prompt_bytes=1000) is None
  with pytest.raises(ConfigError, match="chat_template=own.jinja needs a tokenizer, and .* has no tokenizer.json"):
    load_tokenizer(tmp_path, max_prompt_bytes=1000, chat_template="own.jinja")
