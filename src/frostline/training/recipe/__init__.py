"""What a recipe says beside numbers: metrics, losses of the user's own, adapters, and layers that thaw later."""
