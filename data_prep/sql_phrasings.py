"""How people ask for a cell of a table: one phrasing a line, by what they ask for."""
# ruff: noqa: E501  (one phrasing a line)

from __future__ import annotations

from .grammar import lines

# Slots of a question: {s} the wanted column, {noun} what a row is, {v} the first value, {c} its column, and the whole condition as
# {when} "the place is Oslo and the year is 1990", {with} "a place of Oslo and a year of 1990", {has} "has a place of Oslo …".
ANY = lines("""
    What is the {s} when {when}?
    What is the {s} when {when}?
    What is the {s} for the {noun} with {with}?
    What is the {s} of the {noun} that {has}?
    What is the {s} with {with}?
    What was the {s} when {when}?
    What was the {s} of the {noun} with {with}?
    What was the {s} for {v}?
    What is the {s} of {v}?
    What is the {s} for {v}?
    What are the {s} when {when}?
    What's the {s} of the {noun} with {with}?
    What's the {s} for {v}?
    What {s} <has|had|shows|goes with> {with}?
    What {s} is listed when {when}?
    What were the {s} of the {noun} when {when}?
    Which {s} has {with}?
    Which {s} <has|had> {with}?
    Which {s} is that of the {noun} when {when}?
    Which {noun} has {with}?
    Name the {s} for {v}
    Name the {s} when {when}
    Name the {s} with {with}
    Tell me the {s} for {with}
    Tell me the {s} of {v}
    I want <to know|> the {s} for {with}
    If {when}, what is the {s}?
    When {when}, what is the {s}?
    For the {noun} with {with}, what is the {s}?
    With {with}, what is the {s}?
    Can you tell me the {s} that has {with}?
    List the {s} when {when}.
    List all {s} for {v}.
    Give the {s} of the {noun} that {has}.
    What is {s}, when {when}?
    In which {s} was {v}?
    what's the {s} with {c} being {v}
    what is the {s} where {when}
    what are all the {s} with {c} being {v}
    what's the {s} where {when}
""")
WHO = lines("""
    Who is the {s} when {when}?
    Who was the {s} when {when}?
    Who is the {s} of the {noun} that {has}?
    Who was the {s} for {v}?
    Who is the {s} with {with}?
    Who had {with}?
    Who are the {s} when {when}?
    Who is listed as {s} for {v}?
    What {s} <had|has> {with}?
    Which {s} <had|has> {with}?
    Name the {s} for {v}
    who is the {s} where {when}
    Who's the {s} for {v}?
""")
WHEN = lines("""
    What {s} was the {noun} with {with}?
    What {s} did the {noun} have {with}?
    When was the {noun} with {with}?
    When did the {noun} that {has} take place?
    When is {v}?
    On what {s} was {v}?
    On which {s} <is|was> {v}?
    What was the {s} of {v}?
    In what {s} was {v} the {c}?
    What {s} shows {v} as {c}?
""")
WHERE = lines("""
    Where is the {noun} with {with}?
    Where was the {noun} with {with} held?
    Where did the {noun} with {with} take place?
    Where was {v}?
    What {s} is {v} from?
    In which {s} is {v}?
    At which {s} was the {noun} when {when}?
""")
MUCH = lines("""
    How many {s} are there when {when}?
    How many {s} <did|does> {v} have?
    How many {s} for the {noun} with {with}?
    How many {s} were there for {v}?
    How much {s} has {with}?
    What is the number of {s} for {v}?
    What {s} corresponds to {with}?
""")
OF_PERSON = lines("""
    What is {v}'s {s}?
    What was {v}'s {s}?
    What's {v}'s {s}?
    What {s} did {v} <have|get|play|score|record>?
    What {s} is {v}?
    What {s} does {v} <have|play for|come from>?
    Which {s} did {v} <have|play|win>?
    Which {s} <does|did> {v} belong to?
""")
# Columns that have a verb of their own.
VERBS = {
    "Directed by": ("Who directed the {noun} that {has}?", "Who directed {v}?", "Who was the director when {when}?"),
    "Written by": ("Who wrote the {noun} that {has}?", "Who wrote {v}?", "Who was the writer for {v}?"),
    "Title": (
        "What is the name of the {noun} that {has}?",
        "What is the title of the {noun} with {with}?",
        "What was the {noun} with {with} called?",
    ),
    "Original air date": (
        "When did the {noun} with {with} originally air?",
        "When did {v} air?",
        "What day did the {noun} with {with} air?",
    ),
    "Opponent": (
        "Who did they play when {when}?",
        "What team did they face when {when}?",
        "Which opponent <has|had> {with}?",
    ),
    "Winner": ("Who won when {when}?", "Who won the {noun} with {with}?", "Who was the winner for {v}?"),
    "Attendance": ("How many people attended the {noun} with {with}?", "How many people were there when {when}?"),
    "Crowd": (
        "How large was the crowd when {when}?",
        "How many people watched at {v}?",
        "What was the size of the crowd when {when}?",
    ),
    "Score": (
        "What was the score of the {noun} with {with}?",
        "What was the final score when {when}?",
        "How did the {noun} end when {when}?",
    ),
    "College": ("What college did {v} go to?", "Where did {v} attend college?", "Which school had {with}?"),
    "Nationality": (
        "What nationality is {v}?",
        "What is the nationality of the {noun} that {has}?",
        "Where is {v} from?",
    ),
    "Position": (
        "What position did {v} play?",
        "What position does {v} play?",
        "Which position is listed when {when}?",
    ),
    "Nation": ("Which nation <won|has> {with}?", "What country has {with}?", "Name the nation with {with}"),
    "Builder": ("Who built the {noun} with {with}?", "Which company built {v}?"),
    "Stadium": ("In which stadium was the {noun} with {with} played?", "Where did they play when {when}?"),
    "Population": ("What is the population of {v}?", "How many people live in {v}?"),
    "Capital": ("What is the capital of {v}?", "Name the capital for {v}"),
    "Constructor": ("Who built the car when {when}?", "Who is the constructor for {v}?"),
}
AGGREGATES = {
    "count": lines("""
        How many {s} are there for {v}?
        How many {s} have {with}?
        How many {s} <did|does> the {noun} with {with} have?
        How many {s} are listed when {when}?
        How many {s} were there when {when}?
        How many {noun}s have {with}?
        How many {noun}s are there with {with}?
        How many times <was|is> {c} {v}?
        How many different {s} are there when {when}?
        Name the number of {s} for {v}
        Name the total number of {s} with {with}
        What is the total number of {s} when {when}?
        What is the number of {s} with {with}?
        What is the total number of {s}, when {when}?
        What's the total number of {s} with {with}?
        what is the total number of {s} where {when}
        how many {s} with {c} being {v}
        how many {noun}s have {c} {v}
        In how many {s} <was|is> {when}?
    """),
    "max": lines("""
        What is the highest {s} when {when}?
        What is the highest {s} with {with}?
        What is the highest {s} of the {noun} with {with}?
        What was the highest {s} for {v}?
        What is the maximum {s} when {when}?
        What is the largest {s} with {with}?
        What is the greatest {s} for {v}?
        What is the most {s} that {has}?
        Name the most {s} for {v}
        Name the highest {s} when {when}
        Which {s} is the highest one that {has}?
        What is the latest {s} when {when}?
        what's the maximum {s} with {c} being {v}
        Can you tell me the highest {s} that has {with}?
    """),
    "min": lines("""
        What is the lowest {s} when {when}?
        What is the lowest {s} with {with}?
        What was the lowest {s} for {v}?
        What is the smallest {s} of the {noun} with {with}?
        What is the minimum {s} when {when}?
        What is the least {s} for {v}?
        What is the earliest {s} with {with}?
        Name the least {s} for {v}
        Name the lowest {s} with {with}
        Which {s} is the lowest one that {has}?
        What is the fewest {s} when {when}?
        what is the minimum {s} where {when}
        Can you tell me the lowest {s} that has {with}?
    """),
    "avg": lines("""
        What is the average {s} when {when}?
        What is the average {s} of the {noun} with {with}?
        What is the average {s} with {with}?
        What's the average {s} for {v}?
        Which average {s} has {with}?
        Name the average {s} for {v}
        What is the mean {s} when {when}?
        Tell me the average {s} for {with}
    """),
    "sum": lines("""
        What is the sum of {s} when {when}?
        What is the sum of the {s} with {with}?
        What is the total {s} for {v}?
        What's the total {s} of the {noun} with {with}?
        Name the sum of {s} for {v}
        Tell me the sum of {s} for {with}
        How many {s} have {with}?
        What is the sum of {s}, when {when}?
    """),
}
UNCONDITIONAL = lines("""
    How many {s} are there?
    How many {noun}s are listed?
    What is the highest {s}?
    What is the lowest {s}?
    What is the smallest {s}?
    What is the total number of {s}?
    Name the most {s}
    What is the minimum {s}?
    {s} maximum?
    What are the {s} of all the {noun}s?
""")
