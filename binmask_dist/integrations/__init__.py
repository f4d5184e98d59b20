"""BinMask inside other people's training loops. Each module imports the library that it is for."""
