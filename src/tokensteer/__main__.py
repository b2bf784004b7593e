"""`python -m tokensteer` is `tokensteer`."""

from tokensteer.app.cli import run

if __name__ == "__main__":
    run()
