"""Fine-tune pretrained networks on data that stays in its store."""
