"""Word problems in several steps: an opening, a few events in any order, and a question about the outcome.

Parts of one chain share their remembered draws ({n} the hero, {x} what is counted), so any events fit together.
"""
# ruff: noqa: E501  (one sentence a line)

from __future__ import annotations

from typing import NamedTuple

from .grammar import lines


class Chain(NamedTuple):
    """Openings, events, questions, and how many events a problem takes."""

    openings: tuple[str, ...]
    events: tuple[str, ...]
    questions: tuple[str, ...]
    least: int
    most: int


CHAINS = (
    Chain(
        lines("""
            {n=hero} <has|had|owns|collected> {40-300} {x=toy}.
            {n=hero} started the <week|month|school year> with {60-400/5} {x=toy} in {her} collection.
            On {day}, {n=hero} <bought|received> {3-9} <bags|packs|boxes> of {x=toy} with {12-60/2} {x} in each.
            {n=hero}'s <grandmother|father|uncle|teacher> gave {him} {50-200/5} {x=toy} for {her} birthday.
            {n=hero} baked {60-240/12} {x=snack} for {the=event}.
            {n=hero} picked {80-300/10} {x=fruit} <at the orchard|in the garden|this morning>.
        """),
        lines("""
            {She} gave {4-20} of them to {her} {kin}.
            {She} gave {frac} of them to {given}.
            Then {she} <bought|found|got> {5-40} more <at the {store}|from {given}|>.
            {Her} {kin} <took|ate|lost|borrowed> {3-15} of them.
            After that, {she} lost {2-12} of {her} {x} <at school|on the bus|in the yard>.
            The next day, {she} sold {pct} of the <rest|remaining {x}>.
            {She} traded {2-9} of them for <a {good}|{4-12} others>.
            On {day}, {given} gave {him} <another {6-30}|twice as many as {she} had left>.
            {She} put {frac} of what was left <aside|in a box for {given}>.
            {Her} {small} cousins each took {2-6}.
            {She} threw away {2-8} that were <broken|damaged|spoiled>.
            For every {2-5} {x} {she} had left, {her} <mother|father> gave {him} one more.
        """),
        lines("""
            How many {x} does {n} have <left|now|in the end>?
            How many {x} are left?
            If {she} <divides|shares|splits> what is left equally <among|between> {2-6} <friends|boxes|people>, how many <does each get|go to each>?
            If {n} sells the rest for ${1-5} each, how much money <does|will> {she} make?
            What is the total number of {x} {n} has now?
            How many more {x} does {she} need to have {200-600/50}?
        """),
        2,
        5,
    ),
    Chain(
        lines("""
            {n=hero} went to the {store} with ${60-300/10}.
            {n=hero} is shopping for {the=event}.
            {n=hero} <needs|wants> to buy <supplies|clothes|gifts|food> for {her} {kin}.
            At the {store}, {n=hero} fills {her} cart <with things for {the=event}|>.
            {n=hero} and {given} went to the {store} <on {day}|before {the=event}|>.
        """),
        lines("""
            {She} bought {2-9} {thing} <at|for> ${price} each.
            {She} picked up {2-6} {unit} of {fruit} <at|for> ${1-6} <per pound|each>.
            {She} <also|then> bought {a=3-6} {goods} that cost ${8-40} each.
            A pack of {4-12} {thing} costs ${3-15}, and {she} took {2-5} packs.
            {She} chose a {good} for ${15-60} and another that cost {ratio} as much.
            The {goods} were on sale for {pct} off the usual price of ${20-60/5}, so {she} took {2-4}.
            {She} spent ${5-30} on {x=snack} and {frac} of that on {drink}.
            {Her} {kin} asked {him} to get {2-5} {thing}, which were ${2-9} each.
            {She} got {1-3} dozen {x=snack} at ${4-12} a dozen.
            For lunch, {she} had a {meal} for ${5-14}.
            {She} returned a {good} and got ${10-40} back.
        """),
        lines("""
            How much did {she} spend <in total|altogether|>?
            How much <money|change> does {n} have left <from ${200-500/50}|if {she} started with ${150-400/50}>?
            There is a {5-10}% sales tax <on everything|>. What is the total?
            If {she} has a coupon for {pct} off the whole purchase, how much does {she} pay?
            {She} shares the cost with {2-4} friends. How much does each <of them|person> pay?
            What was the <total cost|average price of one thing|final bill>?
        """),
        2,
        5,
    ),
    Chain(
        lines("""
            {n=hero} works as a {job}.
            {n=hero} has {small} jobs to <save for|pay for> a {gadget}.
            {n=hero} started {her} own business as a {job} last {month}.
            To pay for {the=event}, {n=hero} <decided to work|is working> as a {job} <on weekends|after school|in the summer>.
        """),
        lines("""
            {She} earns ${10-40} an hour and works {20-45/5} hours a week.
            {She} makes ${40-200/10} <a day|on every weekday>.
            On weekends {she} works {3-8} hours a day and is paid {times} as much.
            {She} also earns ${8-25} an hour <{chore} for {her} neighbors|at the {store}> for {3-12} hours a week.
            {She} gets a bonus of ${20-200/10} every <month|week|four weeks>.
            {She} pays ${20-120/10} a week for <gas|rent|food|a bus pass>.
            {Her} taxes are {pct} of what {she} makes.
            In {month}, {she} got a raise of {pct}.
            {She} puts {pct} of {her} <pay|earnings|income> in the bank.
            Customers leave ${2-9} tips, and {she} has {5-20} customers a day.
        """),
        lines("""
            How much <money|> does {she} earn in {2-12} weeks?
            How much does {n} have left after {2-8} weeks?
            How many weeks does {she} have to work to earn ${1000-6000/500}?
            What is {her} <yearly|monthly|weekly> income?
            How much more would {she} make if {she} worked {2-6} more hours a week?
        """),
        2,
        4,
    ),
    Chain(
        lines("""
            {p=given}, {q=given} and {r=given} are <comparing|counting|collecting> their {x=toy}.
            {p=given} and {her} friends {q=given} and {r=given} <sold|made|brought> {x=snack} for {the=event}.
            Three <farmers|neighbors>, {p=given}, {q=given} and {r=given}, keep {x=animal}.
            {p=given}, {q=given} and {r=given} <picked|grow|sell> {x=fruit}.
            {r=given} and {q=given} want to have as many {x=toy} as {p=given}.
        """),
        lines("""
            {p} has {10-90} of them.
            {q} has {times} as many as {p}.
            {r} has {5-30} <more|fewer|less> {x} than {q}.
            {r} has {pct} more than {p}.
            {q} has {frac} of what {r} has.
            Together, {p} and {q} have {60-200/10} {x}.
            {r} has {3-20} more than {times} the number {p} has.
            {q} gives {2-9} {x} to {p}.
            {r} <lost|sold> {frac} of {her} {x} on {day}.
        """),
        lines("""
            How many {x} do they have <altogether|in total|combined>?
            How many more does {r} have than {p}?
            What is the <average|difference between the most and the least|total number>?
            If they share all of them equally, how many does each get?
        """),
        3,
        5,
    ),
    Chain(
        lines("""
            {n=hero} is training for a <race|marathon|bike tour|swimming meet>.
            {n=hero} is reading a <book|novel|textbook> of {400-900/10} pages <for school|>.
            {n=hero} is on a road trip of {900-2400/50} miles <to see {her} {kin}|>.
            {n=hero} wants to <do|finish> {300-900/20} <push-ups|math problems|minutes of piano practice> this week.
        """),
        lines("""
            On {day}, {she} <did|finished|covered> {20-90/5}.
            The next day, {she} did {times} as much.
            On {day}, {she} managed only {frac} of what {she} did on {day}.
            On {day}, {she} did {5-40/5} more than the day before.
            {She} did {pct} of the rest on {day}.
            On {day} and {day}, {she} <rested|did {10-60/5} each>.
            For the next {small} days, {she} kept up {20-80/5} a day.
            On {day}, because of <rain|a headache|a party>, {she} stopped after {10-40/5}.
        """),
        lines("""
            How <much|many> did {she} do <in total|in the whole week|>?
            How <much|many> <is|are> left for <the last day|Sunday>?
            What was {her} average per day?
            How many more days does {she} need <at {40-100/10} a day|>?
            What percentage has {she} done?
        """),
        3,
        5,
    ),
    Chain(
        lines("""
            There <are|were> {a=200-1200/20} <people|students|guests> at {the=event}.
            A <school|company|village> has {a=300-2400/60} <students|workers|people>.
            A <theater|stadium|hotel> can hold {a=400-3000/100} people.
            A survey asked {a=200-900/20} people about their favorite <sport|food|subject>.
        """),
        lines("""
            {Pct} of them are <women|adults|under 18|from {city}>.
            {Frac} of the <rest|others> like {sport}.
            {10-90/5} more <arrived|joined> on {day}.
            {Frac} of them <left early|came by bus|wear glasses|have a {pet}>.
            Of those, {pct} <paid|stayed|said yes>, at ${5-30} each.
            {20-90/5} <were sick|stayed at home|left before the end>.
            There are {times} as many <children|men|seniors> as there are <teachers|babies|dancers>.
        """),
        lines("""
            How many <people|of them> are <left|not counted yet>?
            How many <men|children|women> are there?
            How much money was <collected|paid>?
            What <percentage|fraction> of them is left?
            How many more of the first group than of the second are there?
        """),
        2,
        4,
    ),
    Chain(
        lines("""
            {n=hero} left home at {6-10} <am|a.m.> to go to <{city}|the {place}>.
            {n=hero} <drives|rides|travels> from {city} to {city}.
            Every day {n=hero} takes the <bus|train> to <work|school|the {place}>.
            {n=hero} is planning a <hike|trip|bike ride>.
        """),
        lines("""
            {She} drove for {1-5} hours at {30-70/5} miles per hour.
            Then {she} stopped for {10-50/5} minutes to <eat|rest|get gas|see {her} {kin}>.
            After that, {she} went {10-120/10} miles at {20-60/5} mph.
            The next part took {times} as long.
            {She} walked the last {2-6} miles at {2-4} miles per hour.
            Because of <traffic|rain|a closed road>, {she} lost {10-60/10} minutes.
            On the way back, {her} speed was {pct} <higher|lower>.
            {Her} {vehicle} uses a gallon of gas every {20-40/5} miles, and a gallon is ${2-5}.
        """),
        lines("""
            How <far|many miles> did {she} go?
            How <long|many hours|many minutes> did the whole trip take?
            What was {her} average speed?
            How much did {she} spend on gas?
            At what time did {she} get there?
        """),
        2,
        5,
    ),
    Chain(
        lines("""
            {n=hero} <opened|owns|runs> a <bakery|food truck|flower shop|lemonade stand|car wash>.
            {n=hero} makes and sells {x=goods} <online|at the market>.
            The {group} is holding a <bake sale|raffle|car wash|concert> to raise money for {the=event}.
        """),
        lines("""
            It costs ${2-9} to make one {good}, and {she} sells it for ${12-40}.
            {She} sold {20-90} {x=snack} at ${1-5} each.
            On {day}, {she} sold {20-80}, and on {day} {times} as many.
            {She} pays ${100-900/50} a <week|month> in rent.
            {She} bought {10-60/5} {unit} of <flour|sugar|fruit|soap> at ${1-6} each.
            {Her} {small} <helpers|workers> get ${8-20} an hour for {3-8} hours a day.
            {Pct} of the <money|profit> goes to <charity|{her} {kin}|the bank>.
            {10-40} of the {thing} could not be sold.
            A customer ordered {2-6} dozen {snack} and got {pct} off the price of ${6-20} a dozen.
        """),
        lines("""
            How much <profit|money> did {she} make?
            How much <profit|> does {she} make in {2-8} <weeks|days|months>?
            How much is left after <all the costs|paying everyone>?
            How many more must {she} sell to <reach|make> ${500-3000/100}?
        """),
        2,
        5,
    ),
)
