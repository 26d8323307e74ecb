"""Sluice as a library: an engine in the caller's own process, with the checks, texts and defaults of the server.

`llm` is the entry; `sampling_params` what a caller may ask for; `outputs` what comes back; `llm_settings` what an LLM
is made with; `engine_thread` what runs it; `progress_bar` what it shows meanwhile; `lm_eval_adapter` a model for
lm-eval.
"""
