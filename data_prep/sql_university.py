"""Multi-table questions: a university's advising database and what students ask it.

Prompts show some of the tables, always COURSE, in any order. The questions are written the way treebanks tokenise them (`What 's`,
` ?`): the built-in target knows them in that form.
"""
# ruff: noqa: E501  (word lists)

from __future__ import annotations

from random import Random

from .grammar import Grammar, lines, rules
from .lexicon import NAMES

# table: column type, …; a column in parentheses is left out of some prompts.
_SCHEMA = lines("""
    COURSE: COURSE_ID int(11), NAME varchar(255), DEPARTMENT varchar(255), NUMBER varchar(255), CREDITS varchar(255), (LEVEL int(4)), (ADVISORY_NOTE varchar(255)), (ENFORCED_NOTE varchar(255)), DESCRIPTION varchar(16384), (NUM_SEMESTERS int(11)), NUM_ENROLLED int(11), (HAS_DISCUSSION varchar(1)), HAS_LAB varchar(1), HAS_PROJECTS varchar(1), HAS_EXAMS varchar(1), (NUM_REVIEWS int(11)), CLARITY_SCORE int(11), EASINESS_SCORE int(11), (HELPFULNESS_SCORE int(11))
    COURSE_OFFERING: OFFERING_ID int(11), COURSE_ID int(11), SEMESTER int(11), SECTION_NUMBER int(11), START_TIME time, END_TIME time, MONDAY varchar(1), TUESDAY varchar(1), WEDNESDAY varchar(1), THURSDAY varchar(1), FRIDAY varchar(1), (SATURDAY varchar(1)), HAS_FINAL_PROJECT varchar(1), HAS_FINAL_EXAM varchar(1), (TEXTBOOK varchar(30)), (ROOM varchar(30))
    SEMESTER: semester_id int(11), semester varchar(4), year int(11)
    INSTRUCTOR: INSTRUCTOR_ID int(11), NAME varchar(255), (UNIQNAME varchar(255)), (OFFICE varchar(60))
    OFFERING_INSTRUCTOR: OFFERING_INSTRUCTOR_ID int(11), OFFERING_ID int(11), INSTRUCTOR_ID int(11)
    PROGRAM_COURSE: program_id int(11), course_id int(11), workload int(11), category varchar(11)
    PROGRAM: program_id int(11), name varchar(255), college varchar(255), (introduction varchar(255))
    PROGRAM_REQUIREMENT: program_id int(11), category varchar(11), min_credit int(11), (additional_req varchar(100))
    COURSE_PREREQUISITE: pre_course_id int(11), course_id int(11)
    STUDENT_RECORD: student_id int(11), course_id int(11), semester int(11), grade varchar(10), (how varchar(10)), earn_credit varchar(1), (repeat_term varchar(10)), (test_id varchar(10))
    STUDENT: student_id int(11), lastname varchar(255), firstname varchar(255), program_id int(11), (declare_major varchar(255)), total_credit int(11), total_gpa float(3,2), (entered_as varchar(11)), (admit_term int(4)), (degree varchar(10)), (minor varchar(10))
    AREA: course_id int(11), area varchar(30)
    REQUIREMENT: REQUIREMENT_ID int(11), REQUIREMENT varchar(255), COLLEGE varchar(255)
    GSI: course_offering_id int(11), student_id int(11)
    TA: campus_job_id int(11), student_id int(11), location varchar(10)
    CAMPUS_JOB: JOB_ID int(11), TITLE varchar(100), DESCRIPTION varchar(1000), (PAY_RATE float(5,2)), BUILDING varchar(40), CITY varchar(20), STATE varchar(15)
    INSTRUCTOR_REVIEW: instructor_id int(11), student_id int(11), score int(11), review_text varchar(400)
    COURSE_FEEDBACK: COURSE_ID int(11), FAIR_GRADING int(11), SURPRISE_QUIZ int(11), TEAM_WORK int(11), (MOTIVATING int(11)), BONUS_POINTS int(11), CLEAR_LECTURES int(11), (HARD_EXAMS int(11)), (MANY_PAPERS int(11)), HEAVY_READING int(11), STRICT_GRADER int(11), (RECOMMENDED int(11))
""")

_RULES = rules("""
    dept: EECS | EECS | EECS | MATH | PHYSICS | CHEM | BIOLOGY | ECON | HISTORY | PSYCH | ENGLISH | PHIL | STATS | MECHENG | CIVENG
        | NURS | MUSICOL | DANCE | ARTDES | SPANISH | GERMAN | RUSSIAN | CLASSICS | POLSCI | SOC | ANTHRO | ASTRO | GEOG | EDUC | LAW
        | PUBHLTH | BIOINF | AEROSP | NAVARCH | URP | LING | COMPLIT | THEATRE | KINES | PHARM | DENT | ACC | FIN | MKT | SI | ENVIRON
        | ASIAN | JAPANESE | ARABIC | HEBREW | LATIN | MATSCIE | CHE | BIOMEDE | IOE | ENGR | UC | ORGSTUDY | WGS | FILM | AERO
    num: {100-699} | {200-599}
    course: {dept} {num} | {dept} {num} | {num} | {dept} {num}
    prof: Prof. {given} {surname} | Dr. {given} {surname} | {given} {surname} | Prof. {surname} | Professor {given} {surname}
    season: Fall | Winter | Spring | Summer | Spring or Summer | Fall or Winter
    term: next semester | this semester | {season} {2004-2019} | this {season} | the {season} term | next year | {season}
    past: last semester | last year | in the past | in {season} {2004-2015} | last {season}
    level: {100-500/100} -level | upper level | upper-level | {100-600/100} level | introductory | graduate level
    category: ULCS | MDE | Core | PreMajor | Flex Tech | Other | elective | upper level elective | Capstone
    area: machine learning | web technology | computer vision | operating systems | robotics | databases | networking | intelligent systems
        | embedded systems | security | computer graphics | natural language processing | signal processing | algorithms | compilers
        | human computer interaction | software development | computing infrastructure | data mining | game design | VLSI | control systems
    topic: {area} | Organic Chemistry | Number Theory | Modern Poetry | Fluid Mechanics | Labor Economics | Roman Law | Cell Biology | Urban Design
        | Stage Lighting | Linear Models | Marine Ecology | Jazz Piano | Public Finance | Film History | Quantum Optics | Medical Ethics
        | Bayesian Inference | Structural Dynamics | Syntax and Semantics | World Politics | Choral Conducting | Human Anatomy | Tax Policy
        | Database Systems | Greek Drama | Social Theory | Plant Genetics | Game Theory | Thermal Physics | Portrait Drawing | Nursing Research
        | Advanced {dept} Seminar | Topics in {area} | Introduction to {area} | Special Problems in {dept}
    part: morning | afternoon | evening
    weekday: Monday | Tuesday | Wednesday | Thursday | Friday | Mondays | Fridays
    hour: {8-11} A.M. | {1-6} P.M. | {8-12}:{10-50/10} | noon | {1-5}:30 pm
    feature: lab | labs | a final exam | exams | projects | a final project | discussions | a discussion section
    ease: easiest | hardest | most difficult | easier | least difficult | simplest
    class: class | course
    classes: classes | courses
""")

_QUESTIONS = lines("""
    Who teaches {course} ?
    Who is teaching {course} {term} ?
    Who will be the instructor of {course} {term} ?
    {Term} , who teaches {topic} ?
    Which professors teach {course} ?
    Which professor taught {course} {past} ?
    Who else besides {prof} teaches {course} ?
    What is the name of the person teaching {topic} <in|during> {term} ?
    Which {classes} does {prof} teach ?
    What <will|does> {prof} teach {term} ?
    What {classes} did {prof} teach {past} ?
    Has {prof} ever taught {topic} <before|>?
    Does {prof} teach any {dept} {classes} ?
    Besides {course} , what does {prof} teach ?
    List the {classes} of {prof} for {term} .
    When will {prof} next teach {course} ?
    Is {prof} teaching {course} {term} ?
    Are {prof} and {prof} both teaching {course} ?
    Is {prof} the only one who teaches {course} ?
    What is <the best|the worst> {class} taught by {prof} ?
    Which of {prof} 's {classes} have {feature} ?
    How many {classes} does {prof} teach {term} ?
    Does {course} have {feature} ?
    Does {topic} have a lab ?
    Is there a {class} with no {feature} in {dept} ?
    Which {classes} <have|come with|do n't have> {feature} ?
    Show me {dept} {classes} without {feature} .
    What {level} {classes} do n't have {feature} ?
    Are there {feature} in {course} ?
    Will there be exams in {topic} ?
    How many credits is {course} ?
    How many credits do I get for {topic} ?
    What 's the credit count of {course} ?
    What {classes} are worth {1-6} credits ?
    Which {dept} {classes} are {1-6} credits ?
    Are there any {2-4} credit {classes} at the {level} in {dept} ?
    What is {course} about ?
    What is {course} ?
    Can you describe {topic} ?
    What does {course} cover ?
    Is there a {class} on {topic} ?
    Are there any {classes} about {topic} ?
    Do you offer {topic} ?
    Which {classes} deal with {area} ?
    Where should I start if I 'm interested in {area} ?
    I want to take a {class} in {area} , what are my options ?
    Who teaches {area} {classes} ?
    What {area} {classes} are offered {term} ?
    Which department offers {topic} ?
    Is {course} offered {term} ?
    Will {course} be offered in the {part} {term} ?
    What {classes} are <offered|available|being taught> {term} ?
    {Term} , which {level} {classes} are available ?
    Which {dept} {classes} are offered {term} ?
    Are any {level} {classes} offered in {term} ?
    In {term} , how many {classes} does {dept} offer ?
    How many {dept} {classes} are there {term} ?
    Which {category} {classes} can I take {term} ?
    Can I take {course} {term} ?
    Could I take {course} and {course} {term} ?
    What {level} {classes} are there in {dept} ?
    When is {course} offered next ?
    When was {course} last offered ?
    How often is {topic} offered ?
    Was {course} offered {past} ?
    At what time does {course} {meet} {term} ?
    When does {topic} meet ?
    Does {course} meet on {weekday} ?
    Which sections of {course} do n't meet on {weekday} ?
    Which {dept} {classes} are not on {weekday} ?
    What {classes} start after {hour} ?
    Are there {part} sections of {course} ?
    How many sections of {course} are there after {hour} ?
    Which {level} {classes} end before {hour} ?
    What are the {part} times for {course} ?
    Does section {1-600} of {course} meet in the {part} ?
    Is there a section of {course} that starts at {hour} ?
    How many sections are there of {course} {term} ?
    How many people are enrolled in {course} ?
    How large is {course} ?
    How many students take {topic} ?
    What are the prerequisites for {course} ?
    What do I need before taking {course} ?
    Is {course} a prerequisite for {course} ?
    Which {classes} require {course} ?
    After {course} , what {classes} can I take ?
    Have I taken all the prerequisites for {course} ?
    Do I have what I need to take {topic} ?
    Which prerequisites of {course} have I not finished ?
    Does {course} count as {category} ?
    Is {course} a {category} {class} ?
    What {classes} count as {category} ?
    What are the {category} {classes} in {dept} ?
    Which {category} {classes} are the {ease} ?
    How many {category} credits do I need ?
    What {category} {classes} are required for <the|my> major ?
    Do CS majors have to take {course} ?
    Which {level} {class} is the {ease} ?
    What is the {ease} {class} in {dept} ?
    Is {course} or {course} {ease} ?
    How hard is {course} ?
    Between {course} and {course} , which has the lighter workload ?
    What is the workload of {topic} ?
    Which {category} {class} has the least workload ?
    Out of the {classes} I have taken , which one was the {ease} ?
    What grade did I get in {course} ?
    Which {classes} have I already taken in {dept} ?
    Did I take {course} {past} ?
    Have I gotten credit for {course} ?
    How many credits have I earned so far ?
    Which of {prof} 's {classes} have I taken ?
    Who was the GSI for {course} {past} ?
    Who are the GSIs for {course} {term} ?
    What is the final <exam|project> for {course} ?
    What textbook does {course} use ?
    What {classes} are rated as clear and easy in {dept} ?
    Which {classes} have the highest <clarity|easiness|helpfulness> score ?
    Is there <extra credit|heavy reading|a tough grader> in {course} ?
    Tell me the <number|department|name> of the {topic} {class} .
    What 's the <name|number|department> of {course} ?
    Please list all {level} {classes} in {dept} that <have|lack> {feature} .
    Could you show me {classes} of {1-4} credits on {area} {term} ?
    Name {category} {classes} that do n't meet on {weekday} .
""")

_RULES["meet"] = ("meet", "start", "end", "begin")
_GRAMMAR = Grammar(NAMES, _RULES)
_TABLES = {line.partition(":")[0]: line.partition(": ")[2] for line in _SCHEMA}
_OTHERS = tuple(name for name in _TABLES if name != "COURSE")
# How often a table is shown: those that most questions join.
_JOINED = {"COURSE_OFFERING": 6, "SEMESTER": 5, "PROGRAM_COURSE": 3, "INSTRUCTOR": 3, "OFFERING_INSTRUCTOR": 3}
_WEIGHTS = tuple(_JOINED.get(name, 1) for name in _OTHERS)


def schema(random: Random) -> str:
    """CREATE TABLE lines of three to eight tables."""
    size = random.choices(range(2, 8), (13, 19, 34, 18, 14, 2))[0]
    tables = {"COURSE"}
    while len(tables) <= size:
        tables.update(random.choices(_OTHERS, _WEIGHTS))
    names = sorted(tables)  # sets have no order of their own: without this the text would depend on PYTHONHASHSEED
    random.shuffle(names)
    return "\n".join(f"CREATE TABLE {name} ({_columns(random, _TABLES[name])});" for name in names)


def _columns(random: Random, declared: str) -> str:
    columns = declared.split(", ")
    return ", ".join(
        column.removeprefix("(").removesuffix(")") if column.startswith("(") else column
        for column in columns
        if not column.startswith("(") or random.random() < 0.8
    )


def question(random: Random) -> str:
    """One question to an advisor."""
    text = _GRAMMAR.expand(random, _QUESTIONS[int(random.random() * len(_QUESTIONS))])
    return text[:1].upper() + text[1:]
