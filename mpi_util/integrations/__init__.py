"""Other libraries' programs on N ranks. Each module imports its library; importing this package imports none."""
