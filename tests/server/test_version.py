"""The version that a server says has one owner: the pyproject.toml of the checkout, or the installed package."""

from importlib import metadata
import pathlib
import tomllib

from server import version

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_checkout_says_what_its_pyproject_says():
  assert version.server_version() == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_an_installed_package_says_its_own(monkeypatch, tmp_path):
  monkeypatch.setattr(version, "__file__", str(tmp_path / "server" / "version.py"))
  monkeypatch.setattr(metadata, "version", lambda name: {"sluice-serve": "9.8.7"}[name])
  assert version.server_version.__wrapped__() == "9.8.7"
