"""Writes docs/reference/flags.md, the page of the server's flags, from the declarations of settings.

python -m tools.repository.generate_flag_reference
"""

from collections.abc import Iterable

from engine.settings import DeclaredSetting
from server.flags import declared_flags
from server.setting_text import default_text
from tools.measure import ROOT

PAGE = ROOT / "docs" / "reference" / "flags.md"
_HEAD = """# Flags of the server

`python -m tools.repository.generate_flag_reference` writes this page from the settings that the code declares; a test
compares. `python -m server.main --help` shows the flags marked with a star. A boolean flag is
set by its name, and cleared by its name with `no` before it: `--deterministic`, `--nodeterministic`. `--flagfile=FILE`
reads flags from a file, one a line.
"""


def list_flags(flags: Iterable[DeclaredSetting], heading: str, marks_common: bool) -> list[str]:
  """Returns the lines of the tables of flags, one table a group.

  Args:
    flags: group by group.
    heading: the beginning of a group's heading, such as "##".
    marks_common: a star after the name of a common flag.
  """
  lines, group = [], ""
  for declared in flags:
    found = declared.setting
    if found.group != group:
      group = found.group
      lines.append(f"\n{heading} {group}\n\n| flag | default | meaning |\n| --- | --- | --- |")
    default = f"`{text}`" if (text := default_text(declared)) else ""
    unit = f" {found.unit}" if found.unit and default else ""
    limits = f" Allowed: {found.limits()}." if found.limits() else ""
    star = " *" if found.common and marks_common else ""
    lines.append(f"| `--{declared.name}`{star} | {default}{unit} | {found.help}{limits} |")
  return lines


def flag_reference() -> str:
  """Returns the page's text."""
  return "\n".join([_HEAD, *list_flags(declared_flags(), "##", marks_common=True)]) + "\n"


def main() -> None:
  """Runs the command line."""
  PAGE.parent.mkdir(parents=True, exist_ok=True)
  PAGE.write_text(flag_reference())


if __name__ == "__main__":
  main()
