"""What every engine builds on: its protocol, its name, operators and their schemas."""
