"""The prompts heads are trained on where the user gives none: kinds of task times subjects."""

from __future__ import annotations

import torch

_TASKS = (
    "Explain {} to a beginner.",
    "Write a short story that involves {}.",
    "List five facts about {}.",
    "Write a short poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Describe the history of {} in one paragraph.",
    "Give me three tips about {}.",
    "Write an email to a friend about {}.",
    "What is the most common mistake people make with {}?",
    "Summarize what everyone should know about {} in two sentences.",
    "Write a dialogue between two people who talk about {}.",
    "How would you teach {} to a child?",
    "Write a product announcement related to {}.",
    "Make a step by step plan to learn about {}.",
    "Why does {} matter?",
    "Pretend you are an expert in {}. Introduce yourself to an audience.",
    "Write a Python program that has to do with {}.",
    "Make a table with three columns about {}.",
    "What questions should I ask before I decide anything about {}?",
    "Write the opening paragraph of a news article about {}.",
    "Compare {} with something similar.",
    "How has {} changed over the last fifty years?",
    "Return a JSON object that describes {}.",
    "Write a thank-you note that mentions {}.",
    "What equipment or materials does one need for {}?",
    "Act as a travel guide and say something about {}.",
    "Write a multiple choice question about {} and give the answer.",
    "Describe a day in the life of someone who works with {}.",
    "Suggest a title and an outline for a talk about {}.",
    "What would a skeptic say about {}, and how would you answer?",
    "Explain how {} works.",
    "Translate this into Spanish: I would like to know more about {}.",
    "Write a short review of a book about {}.",
    "Give me advice: I am nervous about {}.",
    "Write a diary entry about {}.",
    "How much does {} usually cost, and why?",
    "Draft a speech of five sentences about {}.",
    "Extract the nouns: the old teacher spoke slowly about {} and the river.",
    "What are some good questions about {} for a quiz?",
    "Describe {} without using technical words.",
)

_SUBJECTS = (
    "bread", "volcanoes", "chess", "solar panels", "the human heart", "budgeting", "gardening",
    "sorting lists", "the ocean", "running shoes", "coffee", "electric bicycles", "the moon",
    "job interviews", "small kitchens", "bees", "photography", "public speaking",
    "the French Revolution", "databases", "sleep", "guitars", "recycling", "dinosaurs", "prime numbers",
    "airplanes", "learning a language", "dogs", "glaciers", "the printing press", "board games",
    "vaccines", "houseplants", "bridges", "painting", "city traffic", "a web server", "tea",
    "the immune system", "camping", "robots", "libraries", "inflation", "music theory",
    "dates and calendars", "migration of birds", "a school play", "first aid", "recursion",
    "wood furniture", "video games", "the Roman Empire", "yoga", "magnets", "cheese",
    "password security", "moving to a new city", "swimming", "clouds", "philosophy",
)  # fmt: skip


def default_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` different prompts in an order that depends on the seed; at most 2,400."""
    order = torch.randperm(len(_TASKS) * len(_SUBJECTS), generator=torch.Generator().manual_seed(seed))
    pairs = (divmod(number, len(_SUBJECTS)) for number in order[:count].tolist())
    return [_TASKS[task].format(_SUBJECTS[subject]) for task, subject in pairs]


MAX_PROMPTS = len(_TASKS) * len(_SUBJECTS)
