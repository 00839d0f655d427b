"""The engines themselves, one library a module, and the catalogue of them."""
