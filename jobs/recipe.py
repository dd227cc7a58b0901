"""`rayspec recipe` as a script, for `ray job submit --working-dir . -- python jobs/recipe.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("recipe")
