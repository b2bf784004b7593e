"""The commands of the command line, one module each with main(command, words): `words` is the whole command line."""
