"""How hard a page of Markdown is to read: its sentences, and their Flesch reading ease. Judges prose alone.

Left out are code blocks, tables, headings, HTML and comments. A code span is one word of one syllable, for readers
take it in as a name.
"""

import re

_BLOCKS = re.compile(
  r"^(```|~~~).*?^\1|^    .*?$|<!--.*?-->|<picture>.*?</picture>|<[^>\n]+>", re.MULTILINE | re.DOTALL
)
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_ENDING = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9`])")
_WORD = re.compile(r"[A-Za-z0-9][\w'./,%-]*")
_VOWELS = re.compile(r"[aeiouy]+")


def prose_sentences(markdown: str) -> list[str]:
  """The sentences of a page; an item of a list ends one."""
  paragraphs = [""]
  for line in _BLOCKS.sub("\n", markdown).splitlines():
    if not line.strip() or line.lstrip().startswith(("#", "|", ">")):
      paragraphs.append("")
    elif item := _ITEM.match(line):
      paragraphs.append(line[item.end() :])
    else:
      paragraphs[-1] += " " + line.strip()
  sentences = []
  for paragraph in paragraphs:
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    plain = re.sub(r"`[^`]+`", "Code", plain).replace("**", "")
    sentences += [found.strip() for found in _ENDING.split(plain) if _WORD.search(found)]
  return sentences


def words_of(sentence: str) -> list[str]:
  """The words, numbers included."""
  return _WORD.findall(sentence)


def count_syllables(word: str) -> int:
  """Groups of vowels, without a silent e at the end; a number has one."""
  letters = re.sub(r"[^a-z]", "", word.lower())
  groups = len(_VOWELS.findall(letters))
  if re.search(r"[^aeiouyl]e$|[^aeiouy]es$|[^aeiouytd]ed$", letters) and groups > 1:
    groups -= 1
  return max(1, groups)


def flesch_reading_ease(markdown: str) -> float:
  """0 is hard, 100 easy (Flesch, 1948): 206.835 - 1.015 words a sentence - 84.6 syllables a word."""
  sentences = [words_of(sentence) for sentence in prose_sentences(markdown)]
  words = [word for sentence in sentences for word in sentence]
  return 206.835 - 1.015 * len(words) / len(sentences) - 84.6 * sum(map(count_syllables, words)) / len(words)
