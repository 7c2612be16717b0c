"""Word problems with a number for an answer: one story a line, in the slot language of `grammar`.

The hero {n=hero} of a story and {she}, {her} (possessive), {him} belong together: `math` binds them to one gender.
"""
# ruff: noqa: E501  (one story a line)

from __future__ import annotations

from .grammar import lines, rules
from .lexicon import NAMES

WORDS = rules("""
    kin: brother | sister | cousin | friend | neighbor | classmate | roommate | best friend | aunt | uncle
    fruit: apples | oranges | pears | peaches | plums | mangoes | lemons | bananas | strawberries | cherries | grapes | kiwis | figs | limes
    toy: marbles | stickers | stamps | baseball cards | toy cars | action figures | seashells | coins | postcards | puzzles | comic books | beads
        | Pokemon cards | keychains | balloons | crayons | buttons | magnets | dolls | building blocks
    snack: cookies | cupcakes | muffins | donuts | brownies | candies | chocolate bars | lollipops | pretzels | crackers | gumballs | pies | scones
    thing: pencils | notebooks | pens | erasers | markers | folders | rulers | books | mugs | plates | candles | towels | t-shirts | socks
        | hats | scarves | light bulbs | batteries | picture frames | water bottles | chairs | tables | lamps | bags of chips | sandwiches
    goods: shirts | pairs of jeans | sweaters | jackets | dresses | pairs of shoes | backpacks | video games | board games | headphones | watches
        | pillows | blankets | bicycles | skateboards | umbrellas | baskets | wallets
    good: shirt | pair of jeans | sweater | jacket | dress | pair of shoes | backpack | video game | board game | watch | lamp | blanket | pillow
        | umbrella | skateboard | tent | helmet | guitar | keyboard | phone case | coffee maker | desk | bookshelf
    gadget: laptop | bicycle | phone | television | camera | tablet | guitar | game console | sewing machine | telescope | drone | used car | treadmill
    animal: cows | pigs | sheep | goats | horses | chickens | ducks | rabbits | dogs | cats | hamsters | turkeys | llamas | geese
    pet: dog | cat | rabbit | hamster | parrot | guinea pig | puppy | kitten | tortoise | horse
    crop: corn | wheat | rice | potatoes | carrots | tomatoes | beans | onions | pumpkins | cabbages | lettuce | peppers
    flower: roses | tulips | daisies | lilies | sunflowers | orchids | carnations | daffodils | violets | marigolds
    drink: orange juice | lemonade | milk | iced tea | apple juice | soda | coffee | hot chocolate | water
    meal: burger | pizza | salad | sandwich | burrito | bowl of soup | steak | plate of pasta | hot dog | taco | smoothie
    store: grocery store | bakery | toy store | bookstore | flower shop | hardware store | pet store | candy store | farmers market | shoe store
        | coffee shop | gift shop | thrift store | sporting goods store | craft store
    place: park | library | beach | museum | school | zoo | mall | movie theater | gym | office | stadium | airport
    job: waiter | teacher | plumber | mechanic | nurse | gardener | painter | tutor | cashier | lifeguard | dog walker | babysitter | carpenter
        | delivery driver | programmer | electrician | photographer | chef | barber | janitor
    subject: math | history | science | English | art | geography | music | chemistry | biology | French
    sport: basketball | soccer | tennis | swimming | hockey | volleyball | baseball | track | gymnastics
    vehicle: car | bus | truck | train | van | motorcycle | bike
    chore: washing the dishes | mowing the lawn | walking the dog | cleaning the garage | doing the laundry | raking leaves | watering the plants
        | vacuuming the house | washing the car | painting the fence | shoveling snow
    frac: half | a third | a quarter | one-third | one-fourth | one-fifth | two-thirds | three-fourths | 1/2 | 1/3 | 1/4 | 2/5 | 3/4 | 2/3 | 1/5 | 3/5 | 1/6
    small: two | three | four | five | six | seven | eight
    times: twice | three times | four times | five times | half | 3 times | 4 times | double | six times
    ratio: {2-5} times | twice | three times | half
    dozen: {1-6} dozen | a dozen | 2 and a half dozen | half a dozen
    pct: {5-95/5}% | {10-90/10}% | {10-50/10} percent | {5-60/5}%
    cents: 25 | 50 | 75 | 20 | 99 | 10 | 40 | 80
    price: {2-20} | {2-20} | {1-9}.{cents} | {5-60/5} | {1-12}.50
    group: class | team | club | band | choir | camp | company | family | village | troop
    unit: pounds | ounces | kilograms | grams | tons
    span: days | weeks | months | hours | years | minutes
    event: the school fair | a birthday party | the picnic | the holidays | a wedding | the science fair | a camping trip | the bake sale
        | the class party | the summer festival | the game on {day} | a family reunion
    length: feet | inches | meters | yards | centimeters | miles
    city: Boston | Denver | Chicago | Paris | Austin | Miami | London | Seattle | Toronto | Portland | Dallas | Rome | Springfield
""")

STORIES = lines("""
    {n=hero} has {a=12-90} {x=toy}. {She} gives {frac} of them to {her} {kin} and then <buys|finds> {3-30} more. How many {x} does {n} have now?
    {n=hero} <has|collected|owns> {a=10-80} {x=toy}. {m=given} has {times} as many {x} as {n}, and {given} has {2-20} <more|fewer> than {m}. How many {x} do they have <altogether|in total|all together>?
    {n=hero} had {a=40-200/2} {x=toy}. {She} gave {5-20} to {m=given} and {frac} of the <rest|remaining> to {given}. How many {x} <are left|does {n} have left>?
    {n=hero} and {m=given} have {a=30-150} {x=toy} <altogether|in total|between them>. {n} has {2-24} more than {m}. How many {x} does {m} have?
    {n=hero} has {ratio} as many {x=toy} as {m=given}. {m} has {4-30} more {x} than {o=given}. If {o} has {a=5-60} {x}, how many {x} does {n} have?
    {n=hero} bought {a=3-12} {x=thing} for ${price} each and {b=2-10} {y=thing} for ${price} each. How much did {she} spend <in total|altogether|in all>?
    {n=hero} goes to the {store} with ${50-200/10}. {She} buys {2-6} {thing} <at|for> ${price} each and {2-5} {goods} at ${8-25} each. How much money does {n} have left?
    A {x=good} costs ${20-120/5}. {n=hero} has a coupon for {pct} off. <There is also a sales tax of {5-10}%.|> How much <does {n} pay|will {n} pay|will the {x} cost> <in the end|after the discount|>?
    The price of a {x=good} was ${20-160/4}. It was <reduced|increased|raised> by {pct} in {month} and then <reduced|increased> by another {pct} in {month}. What is the <final price|price now>?
    {n=hero} wants to buy a {x=gadget} that costs ${200-1200/20}. {She} has already saved ${20-150/10} and earns ${8-25} an hour <as a {job}|working at the {store}|{chore}>. How many hours must {she} work to buy the {x}?
    {n=hero} is saving <up for|to buy> a {x=gadget} that costs ${120-900/10}. Each week {she} saves ${10-40/5} from {her} allowance, and {her} {kin} gives {him} ${20-90/10}. How many weeks will it take to save enough for the {x}?
    {n=hero} works as a {job} and earns ${10-40} an hour. {She} works {4-9} hours a day, {3-6} days a week. How much does {n} earn in {2-8} weeks?
    {n=hero} earns ${x=8-30} per hour for the first {y=30-45/5} hours of a week and {times} <that|as much> for every hour after that. If {she} worked {46-60} hours last week, how much did {she} earn?
    {n=hero} gets paid ${12-40} per hour to teach and ${10-35} to be a {job}. If {she} works {y=40-50/2} weeks a year, {15-40} hours a week as a teacher and {5-20} hours a week as a {job}, what is {her} <annual|yearly> salary?
    {n=hero} makes ${1000-6000/100} a month. {She} spends {pct} of it on rent, {pct} on food, and ${50-300/25} on <clothes|gas|utilities|entertainment>. How much <money|> does {she} have left <each month|>?
    A {job} charges ${20-90/5} for the <visit|first hour> and ${10-60/5} for every <hour|additional hour> of work. {n=hero} had to pay ${150-600/10} . How many hours did the {job} work?
    {n=hero} baked {a=3-12} <batches|trays|pans> of {x=snack}. Each <one|of them> had {b=8-24} {x}. {She} gave {5-30} to {her} {kin} and <sold|packed> the rest in boxes of {3-6}. How many boxes did {she} <need|fill>?
    {n=hero} baked {a=24-120/4} {x=snack}. {Her} {kin} ate {2-9} of them, and {frac} of the rest were <burnt|sold|given away>. How many {x} <are|were> left?
    {n=hero} sells {x=snack} for ${1-6} each and {y=snack} for ${2-9} each. On {day} {she} sold {10-60} {x} and {times} as many {y}. How much money did {she} make?
    A {store} sold {a=20-120} {x=thing} on {d=day}, {times} as many on the next day, and {5-40} fewer on the third day <than on the second|>. How many {x} did it sell <over the three days|in all>?
    A {store} sells {x=goods} for ${15-60} and {y=goods} for ${10-50}. <During a sale|This week|On Black Friday>, all {x} are {pct} off. {n=hero} <buys|wants> {2-5} {x} and {1-4} {y}. What is {her} total <bill|cost>?
    {n=hero} has a {store}. It costs ${2-9} to make each <item|basket|cake|wreath> and {she} sells them for ${12-40} each. If {she} sells {10-60} a week, how much profit does {she} make in {2-12} weeks?
    {n=hero} bought a {x=gadget} for ${200-900/20} and sold it for {pct} more than {she} paid. <Then|After that> {she} spent ${20-160/10} on a {good}. How much of the money is left?
    {n=hero} bought {a=4-20} boxes of {x=thing} with {b=6-24} {x} in each box. Each box cost ${5-30}. {She} sells every one for ${1-5}. What is {her} profit?
    {n=hero} has {a=2-9} {x=animal} and {b=3-15} {y=animal} on {her} farm. Each of the {x} eats {2-9} {unit} of food <a|per> day and each of the {y} eats {1-6}. How much food <do they need|is needed> for {5-30} days?
    Farmer {given} has {a=20-90} {x=animal}, {times} as many {y=animal}, and {3-40} {animal}. How many animals are there on the farm <altogether|in total|>?
    On a farm there are {a=10-60} {x=animal}. {Frac} of them are <white|brown|young> and the rest are <black|old|spotted>. If {2-9} <new|more> {x} arrive, how many {x} are there?
    A farmer <plants|grows> {a=6-40} rows of {x=crop} with {b=8-50} plants in <each|every> row. Each plant gives {2-12} {unit} of {x}. If {she} sells {x} for ${1-6} <a pound|each>, how much <money|> will {she} make?
    {n=hero} planted {x=crop} on {frac} of a {100-900/20}-acre field, and {y=crop} on {pct} of what was left. How many acres were <left|not planted>?
    An orchard has {a=20-90} {x=fruit} trees. <Each|Every> tree gives {20-90} {unit} of fruit. If {pct} of the fruit is <spoiled|eaten by birds|rotten> and the rest is packed into {5-20/5}-pound boxes, how many boxes are needed?
    {n=hero} picked {a=10-80} {x=fruit}, {m=given} picked {times} as many, and {o=given} picked {3-30} less than {m}. How many {x} did they pick <in all|altogether>?
    A basket <has|contains|holds> {a=30-120} pieces of fruit. {pct} are {fruit}, {frac} of the rest are {fruit}, and the rest are {x=fruit}. How many {x} are in the basket?
    {n=hero} is {a=5-40} years old. {Her} {kin} is {times} as old. In {3-20} years, how old will {her} {kin} be?
    {n=hero} is {2-15} years older than {m=given}. {m} is {times} as old as {o=given}. If {o} is {4-25} years old, how old is {n}?
    The sum of the ages of {n=hero} and {m=given} is {30-90}. {n} is {2-18} years older than {m}. How old will {m} be in {3-15} years?
    {Small} years ago, {n=hero} was {times} as old as {m=given}. If {m} is now {8-30} years old, how old is {n} now?
    {n=hero}'s <mother|father|grandmother|uncle> is {times} as old as {n}, who is {5-25}. How old was {n}'s <mother|father|aunt> when {n} was born if {she} is {2-8} years <older|younger>?
    {n=hero} drives <for|> {2-6} hours at {30-70/5} miles per hour and then {1-5} hours at {20-65/5} <mph|miles per hour>. How <far|many miles> did {she} drive <in total|>?
    A {x=vehicle} leaves {city} at {5-11} <am|a.m.> and travels at {30-80/5} miles per hour. Another {vehicle} leaves {2-3} hours later at {50-90/5} mph. How far apart are they at {1-6} <pm|p.m.>?
    {n=hero} <lives|works> {a=4-40} miles from <the {place}|school|work>. {She} <drives|bikes|rides> there and back {3-6} times a week. How many miles does {she} travel in {2-8} weeks?
    {n=hero} <runs|jogs|walks> {2-9} miles on {day} and {times} as far on {day}. If {she} runs at {3-8} miles per hour, how many hours does {she} spend <running|on it> in the two days?
    {n=hero}'s {x=vehicle} gets {15-50/5} miles per gallon. Gas costs ${2-5} a gallon. How much will it cost to drive {100-900/50} miles <there and back|to {city}|>?
    A tank <holds|contains> {100-900/50} gallons of water. It is {frac} full. Water <leaks out|is pumped in> at {2-15} gallons per <minute|hour>. How long until the tank is <empty|full>?
    {n=hero} fills a <pool|bathtub|pond> with a hose that gives {5-40/5} gallons a minute. The pool holds {600-6000/300} gallons and already has {100-500/100} gallons <in it|>. How many minutes will it take to fill <it|the rest>?
    {n=hero} reads {10-60} pages of a book <every day|a day|each night>. The book has {200-900/20} pages. After {3-9} days, how many pages <are left|does {she} have left to read>?
    {n=hero} read {10-50} pages on {day}, {times} as many on the next day, and {5-40} pages on the third day. If the book has {200-450/5} pages, how many <more|> pages does {she} have to read?
    {n=hero} has to read a {150-600/10}-page book in {5-14} days. {She} has read {frac} of it in {2-4} days. How many pages a day must {she} read to finish <on time|>?
    There are {a=20-90} <students|children|kids> in a {group}. {Frac} of them are <girls|boys>. {pct} of the <girls|boys> <wear glasses|play {sport}|have a {pet}>. How many <girls|boys> do not?
    There are {a=200-1200/20} students at a school. {pct} of them take {x=subject}, and {frac} of <those|the others> also take {y=subject}. How many students take {y} <but not {x}|>?
    In a {group} of {20-60} <students|people>, {5-15} like {x=sport}, {3-12} like {y=sport}, and {1-5} like both. How many people like neither?
    A teacher has {a=100-400/10} {x=thing}. {She} gives {b=2-9} to each of the {c=15-30} students in the class and keeps the rest <for next year|in {small} equal boxes>. How many {x} <are left|are in each box>?
    {n=hero} scored {60-99} on the first {x=subject} test, {60-99} on the second, and {60-99} on the third. What must {she} score on the fourth test to have an average of {80-95}?
    A test has {20-60/5} questions. {n=hero} got {pct} of them right. <Each right answer is worth {2-5} points and each wrong one costs 1 point.|Every question is worth {2-4} points.> How many points did {n} get?
    In a {x=sport} game, {n=hero} scored {8-30} points, {m=given} scored {times} as many, and {o=given} scored {2-9} fewer than {n}. How many points did the three score <together|in total>?
    {n=hero} practices {x=sport} for {2-4} hours <a day|every weekday> and {2-6} hours <on Saturday|on each day of the weekend>. How many hours does {she} practice in {2-9} weeks?
    A team won {pct} of its {20-80/5} games. It lost {2-12} games and the rest were ties. How many games <ended in a tie|were ties>?
    {n=hero} can <type|write|read> {30-90/5} words per minute. {She} has to write {2-6} essays of {400-1500/100} words. How many minutes will it take {him}?
    It takes {n=hero} {10-60/5} minutes for {chore} and {times} as long for {chore}. {She} did both {2-4} times this week. How many hours did {she} spend <on chores|in all>?
    {n=hero} spends {20-90/10} minutes on {x=subject} homework, {times} as long on {y=subject} homework, and {10-40/5} minutes on {subject}. How many <minutes|hours> does {she} study?
    {n=hero} can paint a <room|fence> in {3-8} hours, and {m=given} can do it in {2-6} hours. <How long do they need|How many hours will it take> to paint {2-6} <of them|rooms> if they work <together|one after the other>?
    {a=3-9} <workers|machines|painters> can <build|finish|make> {12-60/6} {x=thing} in {2-8} hours. How many {x} can {10-20} of them make in {3-12} hours?
    A machine makes {20-200/10} {x=thing} <an hour|per hour>. It worked {4-10} hours on {day} and {3-9} hours on {day}. If {2-9}% of the {x} are <broken|faulty>, how many good {x} were made?
    {n=hero} <uses|needs> {2-5} cups of flour and {2-4} cups of sugar to bake {12-36/6} {x=snack}. How many cups of <flour|sugar> does {she} need <to bake|for> {60-240/12} {x}?
    A recipe <needs|calls for> {2-6} eggs <for each|per> cake. {n=hero} has {dozen} eggs and wants to bake {3-9} cakes. How many <more|> eggs <must {she} buy|are left>?
    {n=hero} made {2-8} <liters|gallons|quarts> of {x=drink}. {She} <drank|spilled> {frac} of it and poured the rest into {6-16} <glasses|cups>. How much {x} is in each glass?
    A restaurant <bill|check> comes to ${30-160/5}. {n=hero} <adds|leaves> a {10-25/5}% tip and <splits it|shares the bill> with {2-6} friends. How much does <each of them|everyone> pay?
    {n=hero} orders a {x=meal} for ${6-18}, a {y=meal} for ${4-15}, and {2-5} <drinks|sodas> at ${1-4} each. {She} pays with a ${50-100/50} bill. How much change does {she} get?
    Tickets to the {x=place} cost ${8-30} for adults and ${4-15} for children. A family with {2-4} adults and {2-6} children <visits|goes>, and they have a coupon for ${5-20} off. How much do they pay?
    {a=120-600/10} people <came to|visited> the {x=place} on {day}. {Frac} of them were children. Each adult paid ${6-20} and each child paid ${2-9}. How much money was <collected|made>?
    A <bus|train> starts with {20-60} passengers. At the first stop {5-18} get off and {3-20} get on. At the second stop {frac} of the passengers get off <and {2-9} get on|>. How many passengers are on it now?
    A parking lot has {4-12} rows with {10-40} spaces <each|in every row>. {pct} of the spaces are <taken|full>. If {5-30} more cars come, how many spaces are <free|empty>?
    A building has {4-30} floors, and {6-20} <rooms|apartments> on <each|every> floor. {Frac} of the <rooms|apartments> are <empty|occupied>. How many are <occupied|empty>?
    A <rectangle|garden|room|field> is {10-60} {u=length} long and {5-40} {u} wide. <What is its perimeter|How much fence is needed to go around it|What is its area>?
    {n=hero} has a garden that is {8-40} feet by {6-30} feet. Fence costs ${2-15} per foot <and the gate costs ${20-90/10}|>. How much does it cost to fence the garden?
    The length of a rectangle is {times} its width. Its perimeter is {24-240/12} {u=length}. What is <its area|its length> in <square|> {u}?
    {n=hero} has a rope that is {20-200/4} {u=length} long. {She} cuts off {frac} of it for a swing and cuts the rest into pieces of {2-6} {u}. How many pieces does {she} get?
    A <tree|plant|sunflower> is {4-30} inches tall. It grows {1-6} inches <every month|a week|each year>. How tall will it be <in|after> {4-30} <months|weeks|years>?
    {n=hero} <weighs|weighed> {110-260} pounds. {She} <lost|gained> {2-6} pounds a month for {3-10} months and then <gained back|lost> {2-12} pounds. How much does {she} weigh now?
    {n=hero} is {48-76} inches tall. {Her} {kin} is {2-9} inches <taller|shorter>, and {m=given} is {pct} of the height of {n}. How tall are they <together|altogether>?
    {n=hero} <walks|walked> {3000-12000/500} steps a day. {She} <wants|has> to walk {60000-120000/5000} steps in a week. How many more steps a day does {she} need?
    {n=hero} drinks {4-9} glasses of water a day. Each glass <holds|has> {6-16} ounces. How many ounces does {she} drink in {1-4} weeks?
    {n=hero} takes {2-4} pills <a day|every day> for {10-30} days. <A bottle has {20-60/10} pills and costs|Each bottle of {20-60/10} pills costs> ${5-30}. How much <must {she} pay|does the medicine cost>?
    {n=hero}'s {x=pet} eats {1-4} cups of food a day. A bag <has|holds> {40-120/10} cups and costs ${15-60/5}. How much does {n} spend on food in {60-360/30} days?
    {n=hero} buys a {x=gadget} on <credit|a payment plan>. The price is ${300-2400/60}. {She} pays {pct} <at once|down> and the rest in {4-12} equal monthly payments. How much is each payment?
    {n=hero} <borrowed|put> ${500-6000/100} <from the bank|in a savings account> at {2-12}% simple interest a year. How much <will {she} owe|money will there be> after {2-6} years?
    {n=hero} has {2-15} <quarters|dimes|nickels>, {2-20} <dimes|pennies|nickels>, and {2-9} dollar bills. How much money does {she} have <in cents|in all>?
    {n=hero} found {3-20} quarters and {2-30} dimes in {her} <car|couch|piggy bank>. {She} spent ${1-2} on a {meal}. How many cents <are left|does {she} have left>?
    {n=hero}, {m=given} and {o=given} share ${90-900/30} in the ratio {1-3}:{2-4}:{3-6}. How much <more|> does {o} get <than {n}|>?
    {n=hero} <gave|donated> {pct} of {her} ${400-4000/100} <prize|bonus|inheritance> to <charity|the library|a hospital> and divided the rest <equally|evenly> among {her} {2-6} <children|nieces|grandchildren>. How much did each <of them|> get?
    For a <bake sale|fundraiser|car wash>, the {group} <needs|wants> to raise ${300-2000/50}. They have sold {20-90} {x=snack} at ${1-5} each and {10-60} {thing} at ${2-8} each. How much more <money|> do they need?
    {n=hero} is making <bracelets|necklaces|gift bags> for {her} {2-12} friends. Each one needs {5-30} {x=toy}, and {she} already has {20-90}. {X} come in bags of {20-100/10}. How many bags must {she} buy?
    {n=hero} invited {12-60} people to a party. {pct} of them came and each <ate|took> {2-4} {x=snack}. If {x} come in boxes of {6-24/6}, how many boxes <did {n} need|were eaten>?
    {n=hero} <lit|has> {2-9} candles. A candle burns for {3-12} hours <and costs ${1-6}|>. If {she} burns one for {1-4} hours every night, how many candles does {she} need for {14-60} nights?
    A library has {200-2000/50} books. {pct} of them are for children, {frac} of the rest are <novels|about {subject}>, and the others are <magazines|for reference>. How many are <for reference|not for children>?
    A <florist|gardener> has {40-200/5} {x=flower}, {times} as many {y=flower}, and {10-60} {flower}. {She} makes bouquets of {6-15}. How many bouquets can {she} make?
    {n=hero} puts {3-12} {x=flower} and {2-9} {y=flower} into each vase. {She} has {4-12} vases. {X} cost ${1-4} each and {y} cost ${2-5} each. How much <did {she} spend|do the flowers cost>?
    {n=hero} <recorded|watched|downloaded> {3-12} <movies|shows|videos>, each {40-150/10} minutes long. {She} watches {2-4} hours <a day|every evening>. How many days will it take {him} to watch <them all|everything>?
    {n=hero} <downloads|uploads> a {20-200/10} GB <game|file>. The speed is {2-10} GB per minute, but after {frac} of it <there is an update of {10-30/5} minutes|the speed drops by half>. How many minutes does it take <in all|>?
    {n=hero} posts {2-9} pictures a day and {m=given} posts {times} as many. How many pictures do <they|the two of them> post in {10-60/5} days?
    {n=hero} takes {2-9} <hours|minutes> to <knit|sew|make> a <hat|scarf|toy> and {times} as long to make a <sweater|blanket|dress>. How long does it take {him} to make one of each for {her} {2-6} <grandchildren|children|friends>?
    A <truck|ship|plane> can carry {1000-9000/500} {u=unit}. It is loaded with {10-60} boxes of {20-90/5} {u} and {5-30} crates of {30-120/10} {u}. How many more {u} can it carry?
    {n=hero} has {2-9} <shelves|boxes|drawers>. There are {5-20} {x=thing} <on|in> each one. If {she} <gives away|loses|sells> {frac} of the {x} and buys {2-30} new ones, how many {x} will {she} have?
    {n=hero} is <twice|three times> as fast as {m=given} at {chore}. If {m} needs {30-120/6} minutes, how long does it take them to do it {2-5} times each?
    The temperature was {40-90} degrees <in the morning|at noon>. It <rose|dropped> {2-6} degrees an hour for {2-6} hours and then <fell|rose> {3-12} degrees. What was the temperature <in the end|at night>?
    {n=hero} <caught|saw> {4-30} fish on {day}. On {day} {she} caught {times} as many. {Frac} of all the fish were <thrown back|too small>. How many fish did {she} keep?
    A <candle|box|jar> weighs {2-12} {u=unit}. {n=hero} has {10-60} of them, and {m=given} has {pct} more. What is the <total|combined> weight of {m}'s <jars|boxes> in {u}?
    {n=hero} leaves home at {6-8}:{10-50/10} and <walks|drives> for {15-60/5} minutes to the {x=place}. {She} stays {1-5} hours and comes back in {times} the time. How many minutes is {she} away <from home|>?
    {n=hero} has {a=100-500/10} <pieces of candy|{x=toy}>. {She} keeps {10-60} and shares the rest <evenly|equally> between {her} {3-9} <friends|cousins|siblings>. How many does each get?
    A phone plan costs ${20-60/5} a month <and|plus> ${1-9} for <each|every> gigabyte over {5-20/5}. {n=hero} used {22-60} gigabytes in {month}. What was {her} bill?
    {n=hero} rents a {x=vehicle} for ${20-90/5} a day plus {10-60/5} cents a mile. {She} keeps it {2-9} days and drives {100-900/50} miles. How much does {she} pay?
    {n=hero} and {m=given} are <racing|running>. {n} runs {200-600/20} feet per minute and {m} runs {pct} faster. How far ahead is {m} after {3-20} minutes?
    In a box there are {a=10-60} {c=color} <balls|pens|marbles>, {times} as many {d=color} ones, and {5-30} {color} ones. What <percentage|fraction> of them are {c}?
    There are {10-60} more {x=animal} than {y=animal} <at the {place}|in the zoo>. If there are {100-400/10} of them <altogether|in total>, how many {y} are there?
    {n=hero} has {3-12} pairs of <shoes|socks|gloves>. {She} buys {2-6} pairs every <year|month> and throws away {1-2}. How many pairs will {she} have after {2-8} <years|months>?
    At a <school|summer camp|concert>, there is one <teacher|guard|counselor> for every {6-20} <students|children>. If there are {120-720/60} <students|children>, and {2-9} <teachers|counselors> are sick, how many <are there|of them are at work>?
    {n=hero} <makes|paints> {2-9} pictures a week. {She} sells {pct} of them for ${20-200/10} each. How much does {she} earn in {4-40/4} weeks?
    An <elevator|boat> can carry {800-3000/100} pounds. There are {3-8} adults who weigh {120-200/5} pounds <each|on average> and {2-6} children who weigh {40-90/5} pounds <each|>. How much more weight can it take?
    {n=hero} ordered {2-9} pizzas. Each was cut into {6-12/2} slices. {Her} {3-8} guests ate {2-4} slices each and {n} ate {1-3}. How many slices were left?
    A <cyclist|runner|hiker> covers {frac} of a {24-240/12}-mile <route|trail> on the first day and {frac} of the <rest|remaining distance> on the second. How many miles are left <for the third day|>?
    {n=hero} has {5-30} <hens|chickens>, and each lays {3-7} eggs a week. {She} sells <them|the eggs> for ${2-6} a dozen. How much <money|> does {she} make in {4-12/4} weeks?
    The {group} needs {100-600/20} <uniforms|chairs|meals>. <One company|The first shop> asks ${4-15} each, <another|the second> asks ${3-12} each plus ${50-200/10} for delivery. How much <cheaper|less expensive> is the <better|cheaper> offer?
    {n=hero} <has|needs> to be at the {x=place} by {9-11}:00. It is {20-90/5} miles away, and {she} drives {30-60/10} miles per hour, but {she} must stop {10-30/5} minutes for gas. How many minutes before {9-11}:00 must {she} leave?
    {n=hero} has three <boxes|bags|jars> of {x=toy}. The first has {20-90} {x}, the second has {pct} more, and the third has {frac} of the first. How many {x} are there in <all|the three boxes>?
    {n=hero}'s {group} is going to the {x=place}. There are {40-200} people, and each <van|bus|boat> holds {8-40}. Each one costs ${50-300/10} <to rent|a day>. How much does the trip cost <if they stay {2-5} days|>?
    A <company|factory> has {200-1500/50} workers. {Frac} of them are women. <Last year|This year>, {pct} of the women <left|were promoted> and {10-60} <men|new women> were hired. How many <women|people> work there now?
    Of the {a=200-800/20} <passengers|guests|voters>, {frac} <had breakfast|voted for {given}|came by train>. Of the others, {pct} <had nothing|voted for {given}|came by car>. How many <are left|did neither>?
    {n=hero} and {her} {kin} <play|are playing> a game. {n} wins {5-30} <points|rounds>, loses {2-9}, and then doubles {her} score. {Her} {kin} has {20-90}. By how many points <is {n} ahead|do they differ>?
""")

RULES = {**NAMES, **WORDS}
