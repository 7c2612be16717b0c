"""Everyday requests: what people ask a chat assistant for, one template a line."""
# ruff: noqa: E501  (one request a line)

from __future__ import annotations

from .grammar import lines, rules
from .lexicon import NAMES

WORDS = rules("""
    animal: dog | cat | horse | elephant | dolphin | octopus | penguin | honey bee | owl | tiger | whale | snake | rabbit | parrot | bear | shark | frog
        | turtle | butterfly | camel | wolf | goat | spider | kangaroo | eagle | crocodile | fox | hedgehog | salmon | giraffe
    animals: dogs | cats | elephants | dolphins | penguins | owls | tigers | whales | snakes | parrots | bears | sharks | frogs | camels | wolves | foxes
    food: pizza | sushi | bread | rice | pasta | soup | cheese | chocolate | curry | tacos | salad | pancakes | noodles | steak | ice cream | tofu
        | apple pie | yogurt | scrambled eggs | fried chicken | lentils | tea | coffee | ramen | cookies | hummus
    fruit: apple | banana | orange | mango | grape | cherry | lemon | pear | peach | plum | kiwi | pineapple | strawberry | watermelon
    vegetable: carrot | potato | onion | spinach | broccoli | cabbage | cucumber | celery | pepper | radish | beet | pumpkin
    sport: tennis | soccer | golf | basketball | baseball | cricket | hockey | swimming | volleyball | rugby | badminton | skiing | surfing | chess
    hobby: gardening | photography | cooking | painting | hiking | fishing | knitting | running | yoga | camping | reading | cycling | bird watching
        | woodworking | pottery | playing the guitar | learning a language | board games | meditation | baking | journaling
    tech: machine learning | cloud computing | Kubernetes | blockchain | a data pipeline | an API | a neural network | Python | SQL | open source software
        | a database index | a compiler | the internet of things | virtual reality | encryption | a load balancer | version control | big data
        | a search engine | a recommendation system | Linux | a relational database | 5G | quantum computing
    idea: inflation | gravity | photosynthesis | democracy | supply and demand | evolution | climate change | compound interest | plate tectonics
        | the water cycle | natural selection | relativity | globalization | osmosis | the greenhouse effect | capitalism | electricity | friction
        | the stock market | a black hole | a recession | diffusion | entropy | the food chain | magnetism | stoicism | game theory
    skill: public speaking | time management | negotiation | teamwork | leadership | note taking | budgeting | writing | listening | coding | networking
    goal: lose weight | sleep better | save money | learn a new language | become a better writer | find a job | stay healthy | run a marathon
        | grow tomatoes | start a business | make friends | reduce stress | train a puppy | buy a house | plan a wedding | be more productive
        | invest for retirement | build a deck | write a novel | clean a kitchen | pack for a trip | study for an exam | cook for a family
    item: hammer | laptop | bicycle | umbrella | guitar | car | phone | lamp | sofa | camera | backpack | knife | tent | watch | mirror | bottle | drill
    event: a birthday party | a wedding | a job interview | a camping trip | a long flight | a first date | a road trip | a picnic | a marathon | a move
    place: {city} | {country} | {city} | the beach | the mountains | a national park | {state}
    era: World War II | the Renaissance | the Cold War | the French Revolution | the Roman Empire | the Great Depression | the Industrial Revolution
        | the Middle Ages | the American Civil War | the Space Race | the Bronze Age | the Ottoman Empire
    metal: iron | copper | gold | silver | aluminum | tin | zinc | lead | nickel | mercury
    instrument: violin | piano | drum | flute | trumpet | guitar | cello | harp | clarinet | tuba | oboe | cymbals | banjo | xylophone
    device: simile | metaphor | idiom | synonym | rhyme | proverb
    adjective: happy | quick | old | bright | quiet | strong | cold | brave | heavy | simple | angry | beautiful | lazy | clever | rich | gentle | tiny
        | dangerous | polite | loud | calm | honest | rough | fresh | famous | lonely | curious | narrow | modern | generous
    verb: run | write | sing | break | choose | swim | teach | begin | drive | freeze | bring | catch | forget | speak | fly | grow | throw | hide
    noun: child | mouse | leaf | city | tooth | book | goose | knife | box | man | hero | fox | baby | wolf | potato | sheep | cactus | foot
    he: He | She | My brother | The teacher | The old man | Our neighbor | The manager | {given} | The chef | A student | The team | The dog
    did: walked to the store | finished the report | played the piano | opened the window | painted the fence | forgot the keys | won the match
        | cooked dinner | read a book | fixed the car | wrote a letter | missed the train | cleaned the house | told a story | bought a new {item}
    how: quickly | very late | yesterday | in the morning | with a smile | without help | after lunch | again | before the meeting | last night
    sentence: {he} {did} {how}. | The {item} is very {adjective}. | {he} is {adjective}. | The weather is {adjective} today. | {he} {did}.
        | It was a {adjective} {thingy}. | {he} felt {adjective} after {he_} {did}. | The {animal} ran across the road. | There are {2-90} {animals} in the zoo.
    he_: he | she | they
    thingy: day | room | song | movie | question | journey | dinner | city | idea | voice
    unit: meters to feet | kilometers to miles | pounds to kilograms | liters to gallons | inches to centimeters | hours to seconds | grams to ounces
        | miles to kilometers | degrees Celsius to Fahrenheit | kilograms to pounds | minutes to hours | feet to yards | cups to milliliters
    language: Spanish | French | German | Italian | Japanese | Portuguese | Dutch | Korean | Swedish
    greeting: Good morning | Where is the train station? | How much does this cost? | Many thanks for your help | I am hungry | See you tomorrow
        | My name is {given} | I would like a coffee | What time is it? | Happy birthday | I like {hobby} | The {animal} is {adjective}
    company: bank | hospital | bookstore | bakery | software company | airline | hotel | restaurant | school | gym | travel agency
    person_: a famous scientist | a painter | a novelist | a composer | an explorer | a president | an athlete | a film director
    count: three | 3 | five | 5 | four | 10 | ten | two | seven | six
""")

QUESTIONS = lines("""
    What is {idea}?
    What is {tech}?
    What is {tech}, and <why is it useful|how does it work>?
    Explain {idea} <to a child|in simple terms|in one paragraph|>.
    Explain to me the difference between {tech} and {tech}
    What are the <benefits|advantages|disadvantages> of {hobby}?
    What are some <good|popular|easy> {food} recipes?
    How do you make {food}?
    How <do|can|should> I {goal}?
    How to {goal}?
    What is the best way to {goal}?
    Give me <a list of|> {count} <tips|ideas|ways> to {goal}.
    Give me a bulleted list of {count} <reasons|things|steps> to <consider when you {goal}|know about {hobby}>
    What should I <bring to|do before|know before> {event}?
    What <are the rules|is the history|is the goal> of {sport}?
    How many players are on a {sport} team?
    Who <invented|popularized> {sport}?
    Why do people like {hobby}?
    Why do {animals} <sleep so much|live in groups|make noise|migrate|fight>?
    Where do {animals} live?
    What do {animals} eat?
    How long does a {animal} live?
    Is a {animal} a <mammal|bird|reptile|fish>?
    Tell me <about|a story about|some facts about> {animals}.
    What is the capital of {country}?
    What is the population of {city}?
    What language do people speak in {country}?
    Name {count} <cities|rivers|dishes|famous people> <in|from> {country}.
    What are the best <things to do|places to eat|museums> in {city}?
    Plan a {2-7}-day trip to {place}.
    What is <the weather like|the currency> in {country} <in {month}|>?
    What <started|ended|caused> {era}?
    When <was|did> {era} <begin|end>?
    Who was the most important person of {era}, and why?
    Write a <short|> <poem|story|song> about a {adjective} {animal}.
    Write <an email|a letter> to <my boss|a friend|a customer|my landlord> about {event}.
    Write a <tweet|slogan|product description> for a {company}.
    Write a <thank you note|short speech> for {event}.
    Come up with {count} names for a {company}.
    <Classify|Categorize> each of the following as a fruit or a vegetable: {fruit}, {vegetable}, {vegetable}, {fruit}, {fruit}
    Classify each of the following as <a string or a percussion|a wind or a string> instrument: {instrument}, {instrument}, {instrument}
    Which of these are <animals|metals|sports>: {metal}, {animal}, {sport}, {metal}, {animal}
    Identify which instrument is string or percussion: {Instrument}, {Instrument}
    Tell me which of the following are <countries|cities>: {country}, {city}, {city}, {country}, {state}
    Which is <bigger|older|farther north>, {city} or {city}?
    Which one does not belong: {fruit}, {fruit}, {item}, {fruit}?
    From the following list of <foods|words>, which ones are <sweet|spicy|healthy>: {food}, {food}, {food}, {food}
    What are {count} types of {food}?
    What else can you do with a {item}?
    How does a {item} work?
    What should I look for when I buy a {item}?
    Is it <better|cheaper> to <buy|rent> a {item}?
    Why is {skill} important?
    How can I improve my {skill}?
    What is your favorite <food|animal|sport>, and why?
    If I have {3-40} {animals} and {2-12} run away, how many are left?
    A {fruit} costs ${1-5}. How much do {2-20} of them cost?
    What day comes {2-6} days after {day}?
    How many <seconds|minutes> are in {2-30} hours?
    What is {12-99} times {3-40}?
    What is the chemical symbol of {metal}?
    What is the melting point of {metal}?
    What color do you get when you mix {color} and {color}?
    Is {food} <healthy|gluten free|vegetarian>?
    Why is the sky blue <at noon|and the sunset red|>?
    Name {count} <books|movies> about {era}.
    Who is {person_} from {country}?
    What is a good gift for someone who likes {hobby}?
    Describe a {adjective} <day|dinner|morning> in {city}.
    Imagine that you are a {animal}. What would you do in {city}?
    Can {animals} <swim|fly|see in the dark|recognize people>?
    Do you think {tech} will change <the world|{sport}|schools|{hobby}>?
    What were the <main|> <causes|results> of {era}?
    Give me a {1-4}-week plan to {goal}.
    What are the differences between {sport} and {sport}?
    Suggest a <name|diet|toy> for my {adjective} {animal}.
""")

# Instructions with their input below, after a blank line ("//").
TASKS = lines("""
    Rewrite the sentence using a {device}.//{Sentence}
    Rewrite the sentence in the <passive|active> voice.//{Sentence}
    Convert this sentence to <the past tense|a question|reported speech|passive voice|the future tense>.//{Sentence}
    <Edit|Correct> the following sentence for <grammar|clarity|style>.//{Sentence}
    <Identify|Find> the <subject|verb|adjective|object|noun> in the sentence.//{Sentence}
    Is this sentence <formal or informal|positive or negative|a fact or an opinion>?//{Sentence}
    Combine the two sentences into one.//{Sentence} {Sentence}
    Rewrite the following sentence to be more <polite|formal|concise|dramatic>.//{Sentence}
    Translate the sentence into {language}.//{Sentence}
    Sort the following numbers in <ascending|descending> order.//{1-99}, {1-99}, {1-99}, {1-99}, {1-99}
    <Find|Calculate> the <average|sum|median|range> of the numbers.//{1-60}, {1-60}, {1-60}, {1-60}
    Arrange the words in alphabetical order.//{fruit}, {animal}, {item}, {instrument}, {metal}
    Classify the <following|> <words|items> as <living or nonliving|singular or plural>.//{animal}, {item}, {animals}, {metal}
    Make up a story of {2-6} sentences with these words.//{animal}, {item}, {adjective}
    Suggest a title for the text.//{Sentence} {Sentence} {Sentence}
    Decide whether the customer is satisfied.//{Sentence} I <would|would never> come back to this {company}.
    Summarize the text in one sentence.//{Sentence} {Sentence} {Sentence} {Sentence}
    Solve the equation for x.//{2-12}x + {1-40} = {41-120}
    Fill in the blank with a suitable word.//The {animal} is ____ than the {animal}.
    Correct the spelling <mistakes|errors>.//{Sentence}
""")
SHORT_TASKS = lines("""
    What is <a synonym|an antonym|the opposite> of '{adjective}'?
    Provide <a synonym|an antonym|two synonyms> for '{adjective}'.
    What is the past tense of '{verb}'?
    What is the plural <form|> of '{noun}'?
    Convert {2-90} {unit}.
    Translate '{greeting}' into {language}.
    Use the word '{adjective}' in a sentence.
    Give an example of a {device} <about {animals}|with the word '{adjective}'>.
    Name {count} words that <rhyme with|mean the same as> '{adjective}'.
    Calculate the <area|perimeter> of a rectangle that is {2-30} meters long and {2-20} meters wide.
    What is the <square|cube> of {3-40}?
    What is the chemical formula of {metal} <oxide|sulfate|chloride|nitrate>?
    Define the <word|term> '{adjective}'.
    Describe the <function|process> of {idea}.
    What type of word is '{adjective}'?
    Explain the saying about a {animal} and a {item} that you <like|know>.
    Create a question whose answer is '{animal}'.
    Generate a sentence with the word '{verb}' <in the past tense|and the word '{adjective}'|>.
    Spell the number {100-9999}.
    What is the <first|last> letter of '{noun}'?
""")
RULES = {**NAMES, **WORDS}
