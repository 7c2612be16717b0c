"""Conversations of a doctor and a patient, by section of the clinical note that sums them up.

An exchange is `question / answer`; some go on for two turns. A conversation opens, takes some exchanges of its section, and may close.
"""
# ruff: noqa: E501  (one exchange a line)

from __future__ import annotations

from .grammar import lines, rules

# section: weight
SECTIONS = {
    "family and social history": 35,
    "history of present illness": 30,
    "past medical history": 12,
    "chief complaint": 8,
    "past surgical history": 7,
    "review of systems": 6,
    "allergy": 6,
    "medications": 6,
    "assessment": 3,
    "exam": 2,
    "diagnosis": 2,
    "disposition": 2,
    "plan": 2,
    "immunizations": 1,
    "emergency department course": 1,
}

OPENINGS = lines("""
    <Good morning|Good afternoon|Hello|Hi>, <sir|ma'am|Mr. {surname}|Mrs. {surname}|{given}>. How are you <today|doing|feeling>? / <I'm alright|Not too bad|I've been better|Fine|Okay, I guess>, <doctor|thanks>.
    Welcome <back|to the clinic>. <I'm Doctor {surname}|Have a seat|It's nice to see you>. / <Thank you|Thanks for seeing me>, doctor.
    <Let's|I'd like to> <start with|go over> a few questions<, okay| if that's alright|>. / <Sure|Of course|Okay|Go ahead>.
    <Nice to meet you|Good to see you again>. / <You too|Likewise>, doctor.
    Before we <start|begin>, can you <tell me|confirm> your age<, please|>? / <I'm|I am> {20-90} <years old|now|>.
""")
CLOSINGS = lines("""
    <Okay|Alright|Great|Perfect>, <thank you|that's all I need|that is very helpful>. / <You're welcome|No problem|Thanks, doctor>.
    <I see|Got it>. <Let me|I will> <take a look|write that down>. / <Okay|Sure|Sounds good>.
    Is there anything else <you want to tell me|I should know>? / <No|Nope>, <that's all|I think that's it>.
    <Good|Okay>, that's good to hear. / <Yes|Thank you>.
""")
EXCHANGES: dict[str, tuple[str, ...]] = {
    "family and social history": lines("""
        Do you <smoke|use tobacco>? / <No, never|I quit {1-20} years ago|Yes, about {small} cigarettes a day|Yes, a pack a day|I used to, but not anymore>.
        <How about|What about|Any> alcohol? / <Just a glass of wine on weekends|No, I don't drink|Socially|A few beers a week|I stopped drinking in {1990-2019}>.
        Any <recreational|illicit|street> drugs? / <No|Never|Absolutely not|I tried marijuana in college|No, nothing like that>.
        Are you married? / <Yes, for {3-45} years|No, I'm divorced|I'm single|I'm a widow|I live with my <partner|{relative}>>.
        Do you have <any|> <children|kids>? / <Yes, <two|three|four|one>|No|I have a <son|daughter> and {small} grandchildren|We have {small} kids>.
        What do you do for <a living|work>? / I'm a {work}<|, but I'm retired now|. I've done that for {2-40} years>.
        Does anyone in your family have {ill}? / <My {relative} does|Yes, my {relative} and my {relative}|No, not that I know of|My {relative} died of it at {40-90}>.
        <What about|Any> {ill} <in the family|on your mother's side|on your father's side>? / <No|I think my {relative} had it|Yes, my {relative}|Nope, nobody>.
        Are your parents still alive? / <My mother is, my father died of {ill}|Both are alive and well|No, both have passed|They are in their {small_} and healthy>.
        Who do you live with? / <I live alone|With my {relative}|With my wife and {small} kids|My {relative} moved in with me last year>.
        Do you have any <brothers or sisters|siblings>? / <I have {small} brothers|One sister, she's healthy|No, I'm an only child|Yes, my {relative} has {ill}>.
        Do you exercise? / <I walk every day|Not as much as I should|I go to the gym {small} times a week|No, my {pain} hurts too much>.
        Where are you from? / I was born in {city}<|, and moved here in {1970-2015}>.
    """),
    "history of present illness": lines("""
        What brings you in today? / <I've been having|I have|I've had this> {symptom} <for {2-10} <days|weeks|months>|since {day}|for a while now>.
        <How long|For how long> has this been <going on|bothering you>? / <About|Maybe|Around> {small} <days|weeks|months|years><|, I think>.
        <When|How> did it start? / <It came on suddenly|After I fell at work|I woke up with it on {day}|It started slowly|I was lifting a box>.
        On a scale of one to ten, how bad is <it|the pain>? / <About a {small}|It's a {small} right now|At worst a ten, but now a {small}>.
        Does anything make it <better|worse>? / <Rest helps|It's worse when I walk|{Drug} helps a little|Nothing really|It gets worse at night|Lying down helps>.
        Do you have any {symptom}? / <No|Yes, sometimes|A little|Not that I've noticed|Yes, since {day}|No, thank goodness>.
        <What about|Any> {symptom} or {symptom}? / <No, neither|Just some {symptom}|Yes, both|No, I don't think so>.
        Is the pain <sharp or dull|constant|going anywhere else>? / <It's sharp|It comes and goes|It goes down my <leg|arm|back>|More like a dull ache|It's constant>.
        Have you tried anything for it? / <I took {drug}|Just ice and rest|Yes, {drug}, but it didn't help|No, nothing yet|My {relative} gave me {drug}>.
        Have you <had this|felt like this> before? / <No, this is the first time|Yes, about {small} years ago|A few times|Once, in {1995-2018}>.
        Have you seen <anyone|another doctor> for this? / <Doctor {surname} saw me in {month}|I went to the emergency room|No, you're the first|They did an <x-ray|M R I> and said it was fine>.
        Do you have {ill}? / <Yes, for {2-30} years|I was diagnosed in {1980-2019}|Not that I know of|Yes, and I take {drug} for it>.
        How old are you? / I'm {a=18-90}<|, I'll be {=a+1} next month>.
        Which <side|one> is it? / <The right one|My left|Both|Mostly the <right|left>>.
        How is your {pain} today? / <Better than last time|Still sore|It hurts when I move it|The same, really>.
    """),
    "past medical history": lines("""
        <Do you have any|What> medical <problems|conditions><| do you have>? / <I have {ill}|Just {ill}|{Ill} and {ill}|None|Nothing, I'm healthy>.
        Have you ever been diagnosed with {ill}? / <Yes, in {1980-2019}|No|Not me, but my {relative} was|I think so, a few years ago>.
        <What about|Any> {ill}? / <No|Yes, that too|Nope|I had it as a child>.
        Have you ever been in the hospital? / <Once, for {ill}|Only when my kids were born|No, never|Yes, in {month}, for {symptom}>.
        Are you taking anything for <that|it>? / <Yes, {drug}|No, I control it with diet|I was, but I stopped|{Drug}, once a day>.
        Any problems with your {pain}? / <No|I broke it in {1980-2015}|Just some arthritis|Not since the surgery>.
    """),
    "chief complaint": lines("""
        What brings you in today? / <I have {symptom}|My {pain} hurts|I've been having {symptom} and {symptom}|I think I have {ill}|I'm here for my annual checkup>.
        How can I help you<| today>? / <I need a refill of {drug}|My {relative} is worried about my {symptom}|It's my {pain} again|I've got {symptom}>.
        <Is it|Is your pain> on <the left|the right|one side|both sides>? / <Both|The <left|right> side|It changes|Mostly the right>.
        Has it been <getting worse|long>? / <Yes|About {small} <weeks|days>|No, it's the same|Since {day}>.
        You are here for a follow up, right? / <Yes, for my {ill}|That's right|Yes, after {surgery}>.
    """),
    "past surgical history": lines("""
        Have you <ever|> had <any surgeries|surgery>? / <Yes, {surgery}|I had {surgery} in {1975-2019}|No, never|Just {surgery}|{Surgery} and {surgery}>.
        When was <that|it>? / <In {1980-2019}|About {small} years ago|I was {small} years old|Last {month}>.
        Were there any complications? / <No, it went well|I had some bleeding|An infection, but it healed|Not really>.
        Who did <it|the surgery>? / <Doctor {surname}|I don't remember|Someone in {city}>.
        Any other <operations|procedures>? / <No, that's it|{Surgery}, a long time ago|Only {surgery}>.
    """),
    "review of systems": lines("""
        Any {symptom}? / <No|Yes|Sometimes|No, I don't|Um, no|A little bit>.
        <How about|What about> {symptom}? / <No|None|Yes, a little|Not recently>.
        Do you have <any|> {symptom} or {symptom}? / <No, neither|Just {symptom}|No, sir|No, I feel fine>.
        Any problems with your {pain}? / <No|Just when it's cold|Not really>.
        How is your <appetite|sleep|energy>? / <Good|Not great|It's okay|Fine, thank you>.
        Any weight <loss|gain>? / <No|I lost about {4-30} pounds|I gained {5-20} pounds|Not that I know of>.
    """),
    "allergy": lines("""
        <Do you have any|Any> allergies<| to medications>? / <No|Yes, {drug}|I'm allergic to {drug} and {allergen}|None that I know of|No, I don't have any>.
        What happens when you <take|have> <it|that>? / <I get a rash|My face swells|I can't breathe|Hives, all over|I get sick to my stomach>.
        <What about|Any> {allergen}? / <No|Yes, I carry an EpiPen|I'm fine with that|Just a little itching>.
        Are you sure? / <Yes|Yes, I'm sure|Pretty sure>.
    """),
    "medications": lines("""
        What <medications|medicines> are you taking? / <{Drug} and {drug}|Just {drug}|{Drug}, {drug}, and {drug}|None right now>.
        How <much|often> do you take <it|{drug}>? / <{5-500/5} milligrams|Once a day|Twice a day|Every night|{small} times a week>.
        Any <vitamins|supplements>? / <A multivitamin|Vitamin D|Fish oil|No>.
        Do you take anything over the counter? / <Sometimes {drug}|No|Only {drug} for my {pain}>.
        Are you still on {drug}? / <Yes|No, Doctor {surname} stopped it|Yes, but less than before>.
    """),
}
_TALK_ABOUT_RESULTS = lines("""
    I looked at your <x-ray|blood work|M R I|scan>. / <What did you find|Is it bad|Okay>?
    <It looks like|I think> you have {ill}. / <Is that serious|I was afraid of that|What do we do about it>?
    <We will|I'd like to> start you on {drug}. / <Okay|How often do I take it|For how long>?
    <You should|I want you to> <rest your {pain}|stop smoking|come back in {2-8} weeks|see Doctor {surname}>. / <Sure|I can do that|Alright>.
    Does it hurt when I press here? / <Yes, a little|Ouch, yes|No|Only on the right>.
    Your <blood pressure|heart rate|temperature> is <normal|a little high|{60-140}>. / <Okay|That's good|Is that bad>?
    <Your lungs sound|Your heart sounds|Your {pain} looks> <clear|good|normal|a bit swollen>. / <Great|Okay|That's a relief>.
    <We gave you|You got> {drug} in the emergency room, <right|correct>? / <Yes|I think so>.
    <You can go|We'll send you> home <today|tomorrow> with {drug}. / <Thank you|Finally|When should I come back>?
    <Are your|Is your> <vaccines|flu shot|tetanus shot> up to date? / <Yes|I think so|I had it in {2000-2019}|No>.
""")


def exchanges(section: str) -> tuple[str, ...]:
    """The exchanges of a section; sections in which the doctor does the talking share theirs."""
    return EXCHANGES.get(section, _TALK_ABOUT_RESULTS)


RULES = rules("""
    small: two | three | four | five | six | seven | eight
    small_: sixties | seventies | eighties | fifties
    relative: mother | father | sister | brother | grandmother | grandfather | aunt | uncle | cousin | husband | wife | daughter | son | mom | dad
    ill: diabetes | high blood pressure | asthma | cancer | breast cancer | heart disease | high cholesterol | arthritis | thyroid problems
        | depression | anxiety | a stroke | kidney disease | sleep apnea | acid reflux | migraines | C O P D | anemia | glaucoma | lupus | gout
        | hepatitis | seizures | osteoporosis | atrial fibrillation | type two diabetes | colon cancer | dementia | heart failure
    symptom: chest pain | shortness of breath | headaches | back pain | fever | nausea | vomiting | dizziness | numbness | tingling | swelling
        | blurry vision | coughing | fatigue | diarrhea | constipation | knee pain | neck pain | rashes | chills | night sweats | palpitations
        | weakness | stomach pain | trouble sleeping | throat pain | hearing loss | blood in the urine | hip pain | joint pain | weight loss
    pain: back | knee | shoulder | neck | hip | ankle | wrist | elbow | stomach | foot | hand | heart
    drug: Tylenol | ibuprofen | aspirin | Lisinopril | Metformin | penicillin | Lipitor | Zoloft | Advil | insulin | codeine | amoxicillin | Synthroid
        | Plavix | Norvasc | Prednisone | Gabapentin | Omeprazole | sulfa | morphine | Lasix | Coumadin | Xanax | Albuterol
    allergen: latex | peanuts | shellfish | pollen | bee stings | eggs | dust | cats | milk
    surgery: an appendectomy | a C section | a knee replacement | my tonsils out | a hernia repair | heart surgery | back surgery | a hysterectomy
        | my gallbladder removed | cataract surgery | a hip replacement | a colonoscopy | shoulder surgery | a biopsy | my wisdom teeth out
    work: teacher | truck driver | nurse | farmer | carpenter | lawyer | cook | secretary | engineer | mechanic | salesman | housekeeper | accountant
""")
