"""Finds the runner whose KV blocks can move. Changes nothing."""

from engine.batch import Runner
from engine.device.runner import ModelRunner
from engine.errors import ConfigError


def check_runner(runner: Runner) -> ModelRunner:
  """Returns the runner of a model on a device. Raises ConfigError for any other."""
  if not isinstance(runner, ModelRunner):
    raise ConfigError("role: this device has no KV blocks that can move; serve without --fake_device or without --role")
  return runner
