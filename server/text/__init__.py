"""Text of models: tokenizers, chat templates, detokenization, and grammars that an output must follow."""
