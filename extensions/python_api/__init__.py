"""Runs an engine in the caller's own process, with the server's validation, text processing and defaults.

`llm` is the entry point, `sampling_params` and `outputs` are its input and output, and `llm_settings` holds its
settings. `engine_thread` runs the engine, `progress_bar` shows progress, and `lm_eval_adapter` is a model for lm-eval.
"""
