"""`rayspec train_target` as a script, for `ray job submit --working-dir . -- python jobs/train_target.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("train_target")
