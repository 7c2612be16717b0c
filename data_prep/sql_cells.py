"""What stands in the cells of an encyclopedia table, and which kinds of cell are numbers, people, times, places."""
# ruff: noqa: E501  (word lists)

from __future__ import annotations

from .grammar import listing, rules
from .lexicon import NAMES

CELLS = rules(r"""
initialed: {given} {surname} | {given} {surname} | {given} {surname} & {given} {surname} | J. {surname}
    | {given} {surname}, {given} {surname}
golfer: {given} {surname}
college: {state} | {state} State | {city} | {surname} | North {state} | Saint {given}'s | {state} Tech
    | Western {state} | {surname} College
highschool: {surname} High School | {city} Central | Saint {given} Academy | North {surname} | {surname} County
nickname: Tigers | Lions | Bears | Eagles | Hawks | Falcons | Rams | Bulldogs | Panthers | Wildcats | Rockets
    | Giants | Kings | Rangers | Pirates | Cougars | Warriors | Knights | Titans | Sharks | Blazers | Jets | Royals
    | Comets | Bruins | Red Wings | Saints | Senators
team: {city} {nickname} | {city} {nickname} | {city} | {state} {nickname} | {nickname}
club: {city} FC | FC {city} | {city} United | Sporting {city} | {city} City | AC {city} | Dynamo {city}
    | {surname} Athletic | {city} Rovers | {city}
vflteam: Kingsford | Northcote Park | Harbour City | St. Aubin | South Glenroy | Westbrook | Carrington | Ashgrove
    | Footsdale | Easton | Melbourne | Geelong | Richmond | Collingwood
station: W{letter}{letter}{letter} | K{letter}{letter}{letter} | W{letter}{letter}{letter}-FM | DX{letter}{letter}
    | CJ{letter}{letter}
letter: A | B | C | D | E | F | G | H | J | K | L | M | N | P | R | S | T | V | W | X | Y | Z
company: {surname} & Sons | {surname} Motors | {city} Works | {surname} Industries | {surname}-{surname}
    | Canadian {surname} Company | {country} Steel
network: ABC | CBS | NBC | FOX | BBC One | ITV | Channel 4 | TV Tokyo | RTL | TVE | Nine Network | Seven Network
    | Canal+ | HBO | MTV | CTV | SBS | RAI
party: Republican | Democratic | Labour | Conservative | Liberal | Independent | Whig | Federalist | Green
    | Social Democratic | Democratic-Republican | National | People's Party
candidates: {given} {surname} (R) {51-79}.{0-9}% {given} {surname} (D) {21-48}.{0-9}%
    | {given} {surname} (D) Unopposed | {given} {surname} ({party}) {50-70}% {given} {surname} ({party}) {20-45}%

footballpos: Quarterback | Running back | Wide receiver | Linebacker | Defensive back | Offensive tackle | Tight end
    | Kicker | Center | Defensive end | QB | RB | WR | LB | DB | DT | OL
ballpos: Guard | Forward | Center | Guard-Forward | Forward-Center | Point guard | Shooting guard | Power forward
    | Goaltender | Defence | Left wing | Right wing | Midfielder | Defender | Goalkeeper | Striker
result: W {14-48}-{0-13} | L {0-13}-{14-48} | W {21-45}–{3-20} | L {3-20}–{21-45} | W {20-35}-{10-19} (OT)
    | T {10-21}-{10-21}
score: {0-6}-{0-6} | {2-5}–{0-4} | {80-120}-{75-119} | {1-4} – {0-3} | {0-7}–{0-7}
sets: 6–{0-4}, 6–{0-4} | {0-4}–6, 6–{1-4}, 7–5 | 7–6 ({2-6}) , 6–{1-4} | 6-{0-4}, 6-{0-4} | {3-4}–6, {2-4}–6
golfscore: {66-75}-{66-75}-{66-75}-{66-75}={270-295} | {66-74}-{66-74}={134-146} | {65-74}-{66-75}-{66-74}={200-219}
topar: –{1-14} | +{1-9} | E | −{1-12}
place: T{2-20} | {1-12} | 1st | 2nd | 3rd | {4-20}th
record: {0-15}-{0-15} | {10-50}–{10-50} | {8-40}-{9-35}-{1-9} | {0-9}–{0-8}–{0-4}
vflscore: {5-22}.{4-20} ({50-150})
venue: {surname} Park | {surname} Oval | {surname} Stadium | {city} Arena | {city} Coliseum | {surname} Field
    | {city} Memorial Stadium | {month} Street Oval | Lake Oval
surface: Hard | Clay | Grass | Carpet | Hard (i) | Carpet (i)
outcome: Winner | Runner-up
tennis: {city} | {country} Open | {city} Open | {city}, {country} | {nationality} Open | {city} Masters | ITF {city}
golf: {surname} Classic | {city} Open | {surname} Championship | {state} Masters Invitational | {company} Open
    | The Ladies' {city} Classic
margin: {2-9} strokes | 1 stroke | Playoff | {2-4} and {1-3}
round: Final | Semifinals | Quarterfinals | 1st round | 2nd round | Round of 16 | Group A | Qualifying | Third round
openround: 1R | 2R | 3R | 4R | QF | SF | F | A | W | Q1 | Q2 | DNQ | 1r | 0 / 4
grandprix: {nationality} Grand Prix | {city} Grand Prix | {country} Grand Prix | Grand Prix of {city}
    | {surname} {100-500/50}
circuit: {city} | {surname} Raceway | {city} Street Circuit | {surname} International Speedway | Autodromo {surname}
constructor: {surname} | {surname}-{surname} | {surname} - {nickname} | Scuderia {surname} | {surname} Racing
bike: {surname} {100-999/50}R | {surname} CB{100-900/100} | {surname} RS {125-500/125}
lapstatus: +{1-59}.{100-999} | +{2-6} laps | +1 lap | engine | gearbox | accident | transmission | clutch
    | retirement | {38-52}:{10-59}.{100-999} | collision
racetime: {1-3}:{10-59}.{10-99} | {45-59}.{10-99} | {9-24}.{10-99} | {1-2}:{10-59}:{10-59}
method: Submission (armbar) | Submission (rear naked choke) | Decision (unanimous) | Decision (split)
    | TKO (punches) | KO (head kick) | TKO (doctor stoppage) | Submission (guillotine choke)
fight: {surname} Fighting {1-60} | Cage {nickname} {3-40} | {city} Combat {1-25} | King of the {nickname} {2-9}
highs: {given} {surname} ({8-41}) | {surname} ({7-35}) | {given} {surname} , {given} {surname} ({4-12})
locatt: {venue} {10-21},{100-999} | {city} Arena ({9-20},{100-999})
pitcher: {surname} ({0-9}-{0-9}) | {surname} ({1-15}–{0-12})
save: {surname} ({1-30}) | {given} {surname} ({1-20})
percent: .{100-999} | {0-99}.{0-9}% | {10-99}.{10-99}%

title: "The {noun}" | "{adjective} {noun}" | "{noun} and {noun}" | "A {noun} in {city}" | "The {adjective} {noun}"
    | "My {adjective} {noun}" | "{given}'s {noun}" | "{adjective} {day}" | "The Last {noun}"
    | "Who Stole the {noun}?" | "{noun} of the {noun}" | "No {noun} for {given}"
noun: River | Shadow | Garden | Winter | Stranger | Promise | Mirror | Letter | Fire | Bridge | Kingdom | Wedding
    | Island | Doctor | Thief | Secret | Storm | House | Road | Crown | Visitor | Machine | Tower | Silence | Heart
    | Journey | Game | Witness | Moon | Train | Memory | Ghost | Harvest | Trial | Party | Key
adjective: Lost | Broken | Golden | Silent | Dark | Long | Hidden | Crazy | Lonely | Red | Wild | Secret | Perfect
    | Second | Blue | Frozen | Sweet | Final | Empty | Strange | Big | Little | Burning | Good | Hard | New
prodcode: {1-9}{letter}{letter}{letter}{10-29} | {100-999} | {1-8}{10-29} | {letter}{letter}{1000-9999}
    | {3-9}T{5000-7999} | {letter}-{1-6}.{10-24}
viewers: {1-24}.{10-99} | {2-19}.{0-9} | {0-9}.{100-999}
label: {surname} Records | {noun} Music | {adjective} {noun} Records | {surname} | EMI | Columbia | Virgin | Island
    | Capitol
format: CD | LP | Vinyl | Cassette | Digital download | 12" vinyl | CD single | Compact disc | Country
    | Classic rock | Adult contemporary | News/Talk | Sports | Oldies | Hot AC | Christian
award: {nationality} Academy Awards | {city} Film Festival | {noun} Awards | Green {noun} Awards
    | National Theatre Award | {surname} Prize
category: Best Actor | Best Actress | Best Supporting Actor | Best Director | Best Film | Best New Artist
    | Outstanding Lead Actress | Best Musical | Song of the Year | Favorite Male Singer
awardresult: Won | Nominated | Winner | Nominee
role: {given} | {given} {surname} | Dr. {surname} | Himself | The {noun}
frequency: {88-107}.{1-9} | {540-1700/10} | {88-107}.{1-9} FM
channel: {2-60} | {2-50} ({14-51}) | {2-69}.{1-4}
language: English | French | Spanish | German | Japanese | Hindi | Mandarin | Portuguese | Russian | Arabic
    | Italian | Dutch | Polish | Malayalam | Tamil
genre: Rock | Pop | Drama | Comedy | Documentary | Action | Puzzle | Jazz | Folk | Adventure | Role-playing game
    | Sports | Horror

county: {surname} | {surname} County | {city}
district: {state} {1-20} | {state} at-large | {city} {1-4}
area: {10-900} | {1-99}.{10-99} | {1-9},{100-999} | {100-999}.{0-9}
people: {1000-99999} | {1-99},{100-999} | {1-9},{100-999},{100-999} | {100-999}
density: {1-999}.{0-9} | {5-900}
mountain: Mount {surname} | {surname} Peak | {adjective} Mountain | {noun} Peak
range: {surname} Mountains | {adjective} Range | {nationality} Alps
metres: {1-4},{100-999} m | {100-3000} m | {20-400} ft ({6-120} m) | {800-4000}
ship: {adjective} {noun} | HMS {noun} | USS {surname} | {given} {surname} | SS {city} | Empire {noun}
shiptype: Cargo ship | Destroyer | Submarine | Frigate | Cruiser | Tanker | Barque | Steamship | Minesweeper
    | Gunboat | Schooner | Sloop
fate: sunk by U-{20-600} | scrapped {1920-1975} | wrecked off {country} | torpedoed {1-28} {month} {1915-1945}
    | sold to {country}
loco: {0-2}-{2-8}-{0-4}T | {2-4}-{4-8}-{0-4} | Bo-Bo | {surname} Class | Co-Co DE
engine: {1-6}.{0-9}L V{6-12} | {surname} V8 | {surname} {1-4}.{0-9} L{4-6} | {surname} {letter}{10-99}
    | I{4-6} {1-3}.{0-9} turbo
power: {50-600} hp | {40-450} kW ({50-600} PS) | {60-700} bhp | {50-300} PS @ {3000-7000/100}
transmission: 5-speed manual | 6-speed manual | 4-speed automatic | 5-speed automatic | M5 | M6 | A4 | CVT
    | 7-speed DCT
model: {letter}{letter}-{100-9000/10} | {noun} {100-900/100} | {surname} Mk {1-9} | {letter}{1-9}{letter}
    | {100-999}i | {noun} XT
star: HD {10000-99999} | Gliese {100-999} | {letter}eta {city} | NGC {100-7999}
constellation: Orion | Lyra | Draco | Pegasus | Andromeda | Virgo | Leo | Aquarius | Centaurus | Cygnus | Ursa Major
    | Cassiopeia | Fornax | Hydra
storm: {given} | Tropical Storm {given} | Hurricane {given} | Typhoon {given}
category_storm: Category {1-5} hurricane | Tropical storm | Tropical depression | Severe tropical storm
species: Panthera leo | Canis lupus | Ursus arctos | Quercus alba | Corvus corax | Salmo trutta | Bufo bufo
    | Apis mellifera | Lynx rufus | Vulpes lagopus
grades: K-5 | 6-8 | 9-12 | K-8 | 1–6 | 7–12 | K-12 | 9–13
affiliation: Public | Private | Private/Catholic | Private/Methodist | Public/Land grant | Private/Nonsectarian
    | Private/Presbyterian | State
yesno: yes | no | Yes | No | — | partial | n/a | Included
airline: Air {country} | {city} Airways | {surname} Airlines | Trans {country}
icao: {letter}{letter}{letter}{letter}
airport: {city} International Airport | {surname} Airport | {city}
route: SR {10-500} | US {1-99} | {city} to {city} | I-{5-95} | Highway {1-120}
coin: {noun} Coin | {1-10} Dollars | The {adjective} {noun} | {nationality} Wildlife
money: ${1-9},{100-999},{100-999} | {10-900},{100-999} | ${100-990/10},000 | £{1-60},000 | {1000-90000/50}
    | € {10-900/5},000 | ${1-90}.{0-9} million

n9: {0-9}
n20: {1-20}
n40: {1-40}
n99: {1-99}
n150: {3-150}
n500: {20-500}
crowd: {4000-95000} | {5-90},{100-999} | {900-25000/10}
year: {1890-2012} | {1960-2012}
date: {month} {1-28}, {1930-2012} | {month} {1-28} | {1-28} {month} {1940-2012} | {month} {1-28}, {1990-2012}
    | {1-28} {month} | {1930-2011}-0{1-9}-{10-28} | {day}, {month} {1-28} | {1-12}/{1-28}/{1940-2011}
yearspan: {1946-1979}-{1980-1999} | {1985-1999}–{2000-2010} | {1990-2011}–present | {1950-2010} | {2000-2008}-{9-12}
season: {1970-2011} | {1960-1999}-{60-99} | {1990-2010}–{10-12} | {2000-2009}/{10-12}
age: {18-90} | {50-90}years, {2-360}days
height: {5-7}-{0-11} | {170-215} cm | {1-2}.{60-99} m | {5-6}' {0-11}"
weight: {140-330} | {60-120} kg | {150-320} lb

cupname: {nationality} Cup | {city} Trophy | League title ({1-9})
office: Finance | Defence | Foreign Affairs | Education | Justice | Health | Agriculture | Transport | Banking
    | Oil and gas | Retail | Attorney General | Actor | Singer | Model | Politician | Chef
fuel: Diesel | Petrol | Electric | Hybrid | CNG | LPG | Gasoline | Ethanol
fleet: {100-480}-{500-999} ({2-90}) | {1000-1999} ({1-60})
unit: {1-9}th {city} Brigade | {10-90}th {state} Infantry | {2-9}th {nationality} Division
    | Royal {surname} Artillery | {1-9}th Cavalry
dance: Cha-cha-cha | Foxtrot | Quickstep | Waltz | Tango | Paso Doble | Rumba | Samba | Jive | Salsa | Viennese Waltz
weightclass: Heavyweight | Middleweight | Lightweight | Welterweight | Bantamweight | Featherweight | Flyweight
    | Cruiserweight
chemical: {syllable}{syllable}ine | {syllable}{syllable}ol | {syllable}a{syllable} | {syllable}{syllable}ide
syllable: ber | cal | dor | fen | gal | kar | lim | mor | nal | per | quin | ras | sul | tol | val | zan | me | lo
    | pra | tri
disease: Hypertension | Asthma | Type 2 diabetes | Influenza | Psoriasis | Migraine | Epilepsy | Breast cancer
    | Malaria
formula: {letter}{letter}{1-9}O{2-9} | Na{2-6}SO{2-4} | Ca{1-3}{letter}O{3-9} | YBa {2-4} Cu {3-5} O {7-9}
crystal: Tetragonal | Orthorhombic | Cubic | Hexagonal | Monoclinic | Trigonal
card: Royal flush | Straight flush | Four of a kind | Full house | Flush | Straight | Three of a kind | Two pair
""")

RULES: dict[str, tuple[str, ...]] = {**NAMES, **CELLS}

NUMERIC = frozenset(
    listing(
        "n9, n20, n40, n99, n150, n500, crowd, year, people, area, density, viewers, age, weight, money, metres, percent"
    )
)
PERSONAL = frozenset(listing("person, initialed, golfer, highs, pitcher, save"))
TEMPORAL = frozenset(listing("date, year, season, yearspan"))
LOCAL = frozenset(listing("city, venue, county, circuit, tennis, country, state, airport, locatt"))
