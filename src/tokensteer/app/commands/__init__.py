"""The commands of the command line, one module each. main(command, words) prints for people and returns
what --json prints; `words` is the whole command line."""
