"""Pretrained networks by their names in other libraries, with what belongs to them: processors, tokenizers."""
