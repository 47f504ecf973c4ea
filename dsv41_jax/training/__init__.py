"""Training of the demo model: corpus, tokenizer, batches, losses, optimizer, steps and the loop around them."""
