"""Text in, micro-batches out: corpus, tokenizer, token store, order of samples, loader."""
