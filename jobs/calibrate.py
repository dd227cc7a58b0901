"""`rayspec calibrate` as a script, for `ray job submit --working-dir . -- python jobs/calibrate.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("calibrate")
