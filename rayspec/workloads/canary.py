"""Prompts that a new version answers before it takes traffic. A sweep asks them of what it may choose, so that there is
something to hold those answers against."""

from rayspec.workloads.records import Conversation

CANARY_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a fox who learns to swim.",
    "Explain in two sentences why the sky is blue.",
    "List five vegetables and a dish that each is used in.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise how a bill becomes a law in three steps.",
    "Translate to German: The train leaves at seven in the morning.",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost? Explain.",
    "Give me three tips for a job interview.",
    "def quicksort(items):",
    "import os\n\ndef list_files(folder):",
    "What is the difference between a list and a tuple in Python?",
    "Write a polite e-mail that asks for a day off.",
    "Describe how to make a cup of tea, step by step.",
    "SELECT name, COUNT(*) FROM orders",
    "Who wrote Romeo and Juliet, and when?",
)
CANARY_TOKENS = 64  # of each answer, which is greedy


def canary_conversations() -> tuple[Conversation, ...]:
    return tuple(
        Conversation(id=f"canary-{number}", category="canary", turns=(text,))
        for number, text in enumerate(CANARY_PROMPTS)
    )
