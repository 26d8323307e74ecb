"""Checks the locked packages for known vulnerabilities with pip-audit; never reports "none" without an answer.

  make audit [ARGS="--service=osv"]      # in an environment of its own, without Sluice's packages

Exit code 0: no package is vulnerable, or the service did not answer, which the output states. Exit code 1: the listed
packages are vulnerable. Exit code 2: pip-audit failed in another way, for example on a package without a hash.
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
# Beginnings of pip-audit's last line after a missing or invalid answer of the service.
_NO_ANSWER = ("requests.exceptions.", "pip_audit._service.interface.", "ERROR:pip_audit._cli:Tip: your network")


def verdict(report: dict[str, Any], service: str) -> tuple[int, list[str]]:
  """Returns the exit code for pip-audit's report, and the text to print."""
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
  """Returns the exit code for a run of pip-audit, and the text to print."""
  try:
    report = json.loads(done.stdout)
  except ValueError:
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if last.startswith(_NO_ANSWER):
      return 0, [f"skipped: could not be audited, {service} did not answer: {last:.300}"]
    return 2, [f"pip-audit ended with exit code {done.returncode}: {last:.300}"]
  return verdict(report, service)


def audit(lock: pathlib.Path, service: str, osv_url: str) -> subprocess.CompletedProcess[str]:
  """Runs pip-audit."""
  command = [str(TOOL), f"--requirement={lock}", "--require-hashes", "--disable-pip", "--progress-spinner=off"]
  command += ["--format=json", "--aliases=on", f"--vulnerability-service={service}", f"--timeout={_TIMEOUT_S}"]
  command += [f"--osv-url={osv_url}"] if osv_url else []
  return subprocess.run(command, capture_output=True, text=True, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.repository.audit", "Check the locked packages for known vulnerabilities.")
  parser.add_argument("--lock", type=pathlib.Path, default=ROOT / "requirements.lock", help="lock file to audit")
  parser.add_argument("--service", choices=("pypi", "osv"), default="pypi", help="vulnerability service")
  parser.add_argument("--osv_url", default="", help="URL of OSV; empty: pip-audit's default")
  args = parser.parse_args(arguments)
  if not TOOL.exists():
    parser.error(f"{TOOL} is not there: `make audit` installs it")
  code, said = outcome(audit(args.lock, args.service, args.osv_url), args.service)
  print("\n".join(f"audit: {line}" for line in said))
  return code


if __name__ == "__main__":
  sys.exit(main())
