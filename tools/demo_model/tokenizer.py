"""Trains the demo model's byte-level BPE; every word of the grammar must come out as one token."""

import json
import pathlib
import random
import re

from absl import app, flags
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tools.arguments import parse_flags
from tools.demo_model import corpus

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = 2048

# Everyday words that the grammar lacks; they fill the rest of the vocabulary.
_EXTRA_WORDS = """
able above across again against almost alone along already also although always among animal another
answer any anyone anything around arrive art ask away baby back bad bank base bear beautiful because
become before begin behind being believe below beside better between beyond body both bottom break
bring brother build business busy call care carry case catch cause center certain chance change
cheap check child children choose church circle city class clean clear close cloud color common
complete computer consider contain continue control corner correct cost could country course cover
cross crowd cry current cut dance danger dark data daughter dead deal dear decide deep develop
difference different difficult dinner direction discover doctor does done double down draw dream
dress drink drive dry during each early earth east easy eat education effect effort either else end
energy engine enough enter equal error especially even event ever example except expect explain eye
face fact fair fall family famous far fear feel few field fight figure fill final fine finger finish
floor flower follow food force foreign forget form forward free fresh front fruit full future general
glass goes good government grass great ground group grow guess hair half happen hard have head hear
heart heavy height here high himself history hold hope hospital hotel hour house human hundred hurry
idea important inside instead interest island itself join journey just keep kind kitchen know
language large last late laugh law lead learn leave left less lesson letter level life light line
list listen live local long machine make many mark market matter may maybe mean measure meet member
middle might million mind minute miss model modern moment money month mountain mouth move much music
must name nation nature near necessary need neighbor next nice night noise none north nothing notice
number object ocean off office often only open order other our outside over own page paper parent
part pass past pay peace people perhaps person picture piece place plan plant please point police
poor popular possible power present president price problem produce program promise proud public
push question quick quite race radio raise reach ready real reason receive record rest result rich
ride right rise room round rule run safe same save say school science season second secret see seem
sell send sentence serve several shape sharp shop short should side sight sign simple since sister
sit size skin sleep smile social soft soldier some sometimes soon sorry sound south space speak
special spend stand start state station stay step still stone stop straight strange street student
study subject such sugar sure surface system talk taste teach team test than their them these thing
think third those though thousand through today tomorrow tonight top total touch toward town trade
travel trouble true try turn type uncle understand until upon use usual valley value very visit
voice wait wake war wash watch wave weather week weight west what wheel where which while whole why
wide wife wild will window wish with within without woman women wonder word work world worry would
write wrong year yesterday yet young your
""".split()

# Turns as the model was trained on them. Tools, calls and their results have Hermes' form, which
# `--tool_call_parser=auto` knows by its marker; they stand in turns of the roles that the vocabulary has.
CHAT_TEMPLATE = (
  "{{ '<|bos|>' }}"
  "{% if tools %}{{ '<|system|>Tools: <tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
  """{{ '</tools> A call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|end|>' }}{% endif %}"""
  "{% for message in messages %}"
  "{% if message['role'] == 'tool' %}"
  "{{ '<|user|><tool_response>' + (message['content'] or '') + '</tool_response><|end|>' }}"
  "{% else %}"
  "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
  "{% for call in message['tool_calls'] or [] %}"
  "{% set arguments = call['function']['arguments'] %}"
  """{{ '<tool_call>{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' }}"""
  "{{ (arguments if arguments is string else arguments | tojson) + '}</tool_call>' }}"
  "{% endfor %}"
  "{{ '<|end|>' }}"
  "{% endif %}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _sample_texts(seed: int = 0) -> list[str]:
  """Text that contains every word of the grammar, many times in all its spellings."""
  rng = random.Random(seed)
  texts = []
  for _ in range(300):
    for turn in corpus.chat(rng, 1024):
      texts += [turn.user, turn.answer or ""]
    texts.append(corpus.Story(rng).text())
  return texts


def common_words() -> list[str]:
  """Word spellings (with the leading space, where there is one) that must be single tokens."""
  found = set()
  for text in _sample_texts():
    found.update(re.findall(r" ?[A-Za-z]+", text))
  for group in (corpus.NAMES, corpus.CITIES, corpus.WORDS, corpus.VALUES):
    found.update(group)
    found.update(" " + word for word in group)
  return sorted(found)


def train() -> tokenizers.Tokenizer:
  """Returns the trained tokenizer; raises ValueError if a common word is not one token."""
  tok = tokenizers.Tokenizer(models.BPE())
  tok.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  tok.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB_SIZE,
    special_tokens=SPECIAL,
    show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )
  words = common_words()
  extra = [" " + word for word in _EXTRA_WORDS] * 10
  # Each word alone, often enough that no rare one loses against pieces of the others.
  tok.train_from_iterator(_sample_texts() + words * 100 + extra, trainer)
  split = [w for w in words if len(tok.encode(w).ids) != 1]
  if split or tok.get_vocab_size() != VOCAB_SIZE:
    raise ValueError(f"{tok.get_vocab_size()} entries, split words: {split}")
  tok.post_processor = processors.TemplateProcessing(
    single="<|bos|> $A", special_tokens=[("<|bos|>", SPECIAL.index("<|bos|>"))]
  )
  return tok


def save(tok: tokenizers.Tokenizer, folder: pathlib.Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json into `folder`."""
  folder.mkdir(parents=True, exist_ok=True)
  tok.save(str(folder / "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|bos|>",
    "eos_token": "<|end|>",
    "pad_token": "<|pad|>",
    "model_max_length": 4096,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(_) -> None:
  """Trains and saves."""
  save(train(), pathlib.Path(flags.FLAGS.folder))


if __name__ == "__main__":
  flags.DEFINE_string("folder", None, "Where the tokenizer files go.", required=True)
  app.run(main, flags_parser=parse_flags)
