"""Asks, by pip-audit, whether a locked package has a known hole; never says "none" where nobody answered.

  make audit [ARGS="--service=osv"]      # in an environment of its own, without Sluice's packages

Exit code 0: audited, none is vulnerable; or the service could not be reached, which is said, and nothing is known.
Exit code 1: these are vulnerable. Exit code 2: pip-audit failed in another way, as over a package without a hash.
"""

from collections.abc import Sequence
import json
import pathlib
import subprocess
import sys
from typing import Any

from tools.arguments import CommandParser

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / ".venv-audit" / "bin" / "pip-audit"
_TIMEOUT_S = 5
# What pip-audit's last line begins with when the service did not answer, or not as it should.
_NO_ANSWER = ("requests.exceptions.", "pip_audit._service.interface.", "ERROR:pip_audit._cli:Tip: your network")


def verdict(report: dict[str, Any], service: str) -> tuple[int, list[str]]:
  """The exit code for pip-audit's report, and what to say."""
  found = report["dependencies"]
  skipped = [package for package in found if "skip_reason" in package]
  audited = [package for package in found if "skip_reason" not in package]
  holes = [(package, hole) for package in audited for hole in package["vulns"]]
  said = []
  if holes:
    said.append(f"of {len(audited)} packages, vulnerable are:")
    for package, hole in holes:
      remedy = f"install {' or '.join(hole['fix_versions'])}" if hole["fix_versions"] else "no version without it"
      said.append(f"  {package['name']} {package['version']}: {' '.join([hole['id'], *hole['aliases']])}: {remedy}")
  elif audited:
    said.append(f"audited {len(audited)} packages, none vulnerable as far as {service} knows")
  if skipped:
    names = ", ".join(package["name"] for package in skipped[:5]) + (", ..." if len(skipped) > 5 else "")
    said.append(f"skipped: could not be audited, {len(skipped)} of {len(found)} packages ({names}): {service} has none")
  return (1 if holes else 0), said


def outcome(done: subprocess.CompletedProcess[str], service: str) -> tuple[int, list[str]]:
  """The exit code for what pip-audit did, and what to say."""
  try:
    report = json.loads(done.stdout)
  except ValueError:
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if last.startswith(_NO_ANSWER):
      return 0, [f"skipped: could not be audited, {service} did not answer: {last:.300}"]
    return 2, [f"pip-audit ended with exit code {done.returncode}: {last:.300}"]
  return verdict(report, service)


def audit(lock: pathlib.Path, service: str, osv_url: str) -> subprocess.CompletedProcess[str]:
  """Has pip-audit ask."""
  command = [str(TOOL), f"--requirement={lock}", "--require-hashes", "--disable-pip", "--progress-spinner=off"]
  command += ["--format=json", "--aliases=on", f"--vulnerability-service={service}", f"--timeout={_TIMEOUT_S}"]
  command += [f"--osv-url={osv_url}"] if osv_url else []
  return subprocess.run(command, capture_output=True, text=True, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
  """The command line; returns the exit code."""
  parser = CommandParser("python -m tools.repository.audit", "Ask whether a locked package has a known hole.")
  parser.add_argument("--lock", type=pathlib.Path, default=ROOT / "requirements.lock", help="what to ask about")
  parser.add_argument("--service", choices=("pypi", "osv"), default="pypi", help="whom to ask")
  parser.add_argument("--osv_url", default="", help="where OSV is; empty: its own address")
  args = parser.parse_args(arguments)
  if not TOOL.exists():
    parser.error(f"{TOOL} is not there: `make audit` installs it")
  code, said = outcome(audit(args.lock, args.service, args.osv_url), args.service)
  print("\n".join(f"audit: {line}" for line in said))
  return code


if __name__ == "__main__":
  sys.exit(main())
