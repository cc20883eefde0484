"""LoRA: a frozen base and a small adapter that is trained, published and served instead of the weights."""
