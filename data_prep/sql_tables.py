"""Topics of single-table questions: what encyclopedia tables are about, and their columns.

A topic is `noun: column = rule; column = rule; …`. The noun is what one row describes; a rule is one of `sql_cells`.
Column names are written as a table heading would have them, odd characters included.
"""
# ruff: noqa: E501  (one topic a line)

from __future__ import annotations

from .grammar import lines

TOPICS: tuple[str, ...] = lines("""
player: Player = person; No. = n99; Nationality = country; Position = ballpos; Years in {city} = yearspan; School/Club Team = college
player: Pick = n150; Player = person; Position = ballpos; Nationality = country; NHL team = team; College/junior/club team = club
player: Pick # = n99; CFL Team = team; Player = person; Position = footballpos; College = college
player: Round = n20; Choice = n40; Overall = n500; Player name = person; Position = footballpos; Height = height; Weight = weight; College = college
player: Player = person; Position = ballpos; School = highschool; Hometown = city; MLB Draft = team; Conference = college
player: Name = person; Position = ballpos; Number = n99; Class = n9; Height = height; Weight = weight; Games↑ = n20; Date of Birth (Age) = date; Club/province = club
player: Name = person; Career = yearspan; League apps = n500; League Goals = n99; FA Cup Apps = n20; FA Cup Goals = n9; League Cup Goals = n9; Total = n500
player: Rank = n20; Player = person; Country = country; Earnings ( $ ) = money; Events = n40; Wins = n9; Money ( £ ) = money
player: Name = person; Moving from = club; Type = outcome; Transfer window = season; Transfer fee = money; Country = country; Ends = year
player: Player = person; Minutes = n500; Rebounds = n150; Assists = n150; Field Goal % = percent; Free Throw % = percent; Points per game = viewers; Games played = n99
player: Year = year; Starts = n40; Wins = n9; Top 5 = n20; Top-10 = n20; Poles = n9; Avg. Start = density; Avg. Finish = density; Winnings = money; Position = place; Team(s) = constructor
player: Player = person; Car. = n150; Yards = n500; Avg. = viewers; TD's = n9; Long = n99
game: Week = n20; Date = date; Opponent = team; Result = result; Stadium = venue; Record = record; Attendance = crowd
game: Week = n20; Date = date; Kickoff [a ] = racetime; Opponent = team; Final score = result; Team record = record; Game site = venue; TV = network; Attendance = crowd
game: Game = n99; Date = date; Team = team; Score = score; High points = highs; High rebounds = highs; High assists = highs; Location Attendance = locatt; Record = record
game: Date = date; Opponent = team; Score = score; Loss = pitcher; Save = save; Attendance = crowd; Record = record
game: Home team = vflteam; Home team score = vflscore; Away team = vflteam; Away team score = vflscore; Venue = venue; Crowd = crowd; Date = date
game: Date = date; Visitor = team; Score = score; Home = team; Decision = surname; Attendance = crowd; Record = record; Points = n99
game: Tie no = n40; Home team = club; Score = score; Away team = club; Date = date; Attendance = crowd
game: Team #1 = club; Agg. = score; Team #2 = club; 1st leg = score; 2nd leg = score
game: Date = date; Venue = venue; Score = score; Competition = round; Result = score; Goals = n9; H/A/N = outcome
match: Date = date; Time = racetime; Score = score; Set 1 = score; Set 2 = score; Set 3 = score; Total = score; Report = yesno
match: Outcome = outcome; Date = date; Tournament = tennis; Surface = surface; Partner = person; Opponents = initialed; Score = sets
match: Year = year; Championship = tennis; Surface = surface; Opponent in the final = person; Score in the final = sets; Outcome = outcome
fight: Res. = outcome; Record = record; Opponent = person; Method = method; Event = fight; Round = n9; Time = racetime; Location = city
tournament: Date = date; Tournament = golf; Winning score = golfscore; Margin of victory = margin; Runner(s)-up = initialed; To par = topar
tournament: Tournament = golf; Wins = n9; Top-5 = n9; Top-10 = n20; Top-25 = n40; Events = n99; Cuts made = n40
tournament: Tournament = tennis; 2004 = openround; 2005 = openround; 2006 = openround; 2007 = openround; 2008 = openround; 2009 = openround; 2010 = openround; Career Win % = percent
tournament: Date = date; Location = city; Purse( $ ) = money; Winner = person; Score = golfscore; 1st Prize( $ ) = money; Par = n99
golfer: Place = place; Player = golfer; Country = country; Score = golfscore; To par = topar; Money ( $ ) = money; Year(s) won = year; Total = n500; Finish = place
race: Rnd = n20; Race = grandprix; Date = date; Location = city; Pole Position = person; Fastest Lap = person; Race Winner = person; Constructor = constructor; Report = yesno
race: Round = n20; Grand Prix = grandprix; Pole Position = person; Fastest Lap = person; Winning Driver = person; Winning Constructor = constructor; Circuit = circuit; Tyre = letter
race: Race Name = grandprix; Circuit = circuit; City/Location = city; Date = date; Winning driver = person; Winning team = constructor; Round = n20
race: Year = year; 125cc Winner = person; 250cc Winner = person; 500cc Winner = person; Circuit = circuit; Report = yesno
driver: Driver = person; Constructor = constructor; Laps = n99; Time/Retired = lapstatus; Grid = n40; Points = n20; Car # = n99; Make = company
driver: Rider = person; Manufacturer = company; Bike = bike; Laps = n40; Time = lapstatus; Grid = n40
driver: Year = year; Entrant = constructor; Chassis = model; Engine = engine; Points = n99; Team = constructor; Rank = place
driver: Season = season; Series = grandprix; Team Name = constructor; Races = n40; Wins = n9; Poles = n9; F/Laps = n9; Podiums = n20; Points = n150; Position = place
swimmer: Rank = n20; Lane = n9; Name = person; Nationality = country; Time = racetime; Reaction = percent; Notes = yesno; Heat = n9
athlete: Athlete = person; Event = title; Place = place; Time = racetime; Heat Rank = n9; Country = country; Bib = n150
nation: Rank = n20; Nation = country; Gold = n40; Silver = n40; Bronze = n40; Total = n150
games: Year = year; Place = city; Gold = person; Silver = person; Bronze = person; Host = country
club: Position = n20; Club = club; Played = n40; Wins = n20; Draws = n20; Losses = n20; Goals for = n99; Goals against = n99; Points = n99; Goal difference = n40
club: Club = club; Played = n40; Won = n20; Drawn = n9; Lost = n20; Points for = n500; Points against = n500; Tries for = n99; Try bonus = n9; Losing bonus = n9
club: Team = club; Outgoing manager = person; Manner of departure = awardresult; Date of vacancy = date; Replaced by = person; Date of appointment = date; Position = place
club: Team = team; Stadium = venue; Capacity = crowd; Location = city; Opened = year; Head coach = person; Manager 1 = person; Captain = person
season: Season = season; Division = round; League = club; Regular Season = place; Playoffs = round; Open Cup = round; Avg. Attendance = crowd
season: Year = year; Winners = vflteam; Grand Finalist = vflteam; Scores = vflscore; Venue = venue; Crowd = crowd; Margin = n99; Season Result = place
season: Season = season; Champion = club; Runner-up = club; Third Place = club; Top goalscorer = highs; Teams = n40; Goals = n99
cup: Year = year; Champions = club; Runners-up = club; Result = score; Venue = venue; MVP = person
coach: Name = person; Nat = country; From = date; To = date; G = n150; W = n99; L = n99; Win % = percent; Honours = cupname
episode: No. in series = n150; No. in season = n40; Title = title; Directed by = person; Written by = initialed; Original air date = date; U.S. viewers (million) = viewers; Production code = prodcode
episode: Series # = n150; Season # = n40; Title = title; Directed by = person; Written by = initialed; Original air date = date; Production code = prodcode
episode: No. = n150; # = n40; Title = title; Director = person; Writer = initialed; US air date = date; Storyteller = given; Villains = role
episode: No. = n40; Episode = title; Air Date = date; Timeslot = racetime; Rating = viewers; Share = n20; 18–49 (Rating/Share) = viewers; Viewers (m) = viewers; Rank (#) = n99
episode: Episode Number Production Number = prodcode; Sydney = people; Melbourne = people; Brisbane = people; Adelaide = people; Perth = people; Weekly Rank = n40; Nightly Rank = n20
series: Country = country; TV Network(s) = network; Series Premiere = date; Weekly Schedule = day; Host(s) = initialed; Local title = title
film: Year = year; Title = title; Role = role; Director = person; Notes = yesno; Language = language; Studio = company; Gross = money
film: Nomination = category; Actors Name = person; Film Name = title; Director = person; Country = country
award: Year = year; Award = award; Category = category; Nominated work = title; Result = awardresult; Production = title; Role = role
album: Date = date; Region = country; Label = label; Format = format; Catalog = prodcode; Version = format
song: Title = title; Artist = person; Songwriter(s) = initialed; Producer(s) = initialed; Length = racetime; Track number = n20; Album = title; Year = year; Remixed by = person
song: Song = title; Draw = n20; Artist = person; Points = n150; Place = place; Language = language; Televote = n99; Orchestra = person
single: Single = title; Year = year; US Hot 100 = n99; UK Singles Chart = n99; A-side = title; B-side = title; Label = label; Weeks on Chart = n40
station: Call sign = station; Frequency MHz = frequency; City of license = city; ERP W = n500; Height m ( ft ) = metres; Class = letter; FCC info = yesno
station: Station = station; City of license/Market = city; Channel TV ( DT ) = channel; Year of affiliation = year; Owned since = year; Network = network; On-air ID = title
station: Branding = title; Call-Sign = station; Frequency = frequency; Power (kW) = n99; Location = city; Format = format; Website = company
game: Title = title; Developer = company; Genre = genre; Release date = date; Platform(s) = model; Publisher = company; Units sold = people; Metacritic = n99
district: District = district; Incumbent = person; Party = party; First elected = year; Result = awardresult; Candidates = candidates; Status = yesno
election: Year = year; Candidate = person; Party = party; Votes = people; % = percent; Seats = n150; Change = topar; Election = year; 1st Member = person; 2nd Member = person
election: County = county; Obama % = percent; McCain % = percent; Others # = n500; Others % = percent; Total = people
senator: State (class) = state; Vacator = person; Reason for change = fate; Successor = person; Date of successors formal installation = date
president: President = person; Date of birth = date; Date of inauguration = date; Age at inauguration = age; End of term = date; Party = party; Years in Assembly = yearspan; Residence = city
minister: Portfolio = office; Minister = person; Took office = date; Left office = date; Party = party; Term ended = date; Location = city
county: County = county; County seat = city; Population (2010) = people; Area (km²) = area; Density = density; Region = state; Administrative capital = city; Census 2006 population = people
city: Rank = n40; City = city; 1991 Census = people; 2001 Census = people; 2010 Est. = people; Region = state; Metropolitan population (2006) Millions = viewers; Mayor = person
country: Country = country; Population = people; Area (sq mi) = area; GDP per capita in PPP US$ (2012) = money; Growth Rate 1991-01 = percent; Human Development Index = percent; Capital = city
township: Township = surname; County = county; Pop. (2010) = people; Land ( sqmi ) = area; Water (sqmi) = area; Latitude = viewers; Longitude = viewers; GEO ID = people
school: School = highschool; Location = city; Mascot = nickname; Enrollment = crowd; County = county; Year Joined = year; Previous Conference = college; IHSAA Class = letter
school: Institution = college; Location = city; Founded = year; Affiliation = affiliation; Enrollment = people; Team Nickname = nickname; Primary conference = college; Colors = color
school: Name = highschool; Decile = n9; Roll = n500; Area = city; Authority = affiliation; Years = grades; Gender = outcome
winner: School Year = season; Class A = city; Class AA = city; Class AAA = city; Class AAAA = city; Class AAAAA = city
mountain: Rank = n40; Mountain Peak = mountain; Mountain Range = range; Province = state; Elevation = metres; Prominence = metres; Location = country
river: River = surname; Length (km) = area; Basin size = people; Country = country; Crest Length (meters) = metres; Right/Left tributary = outcome; Discharge (m³/s) = density
building: Name = venue; City = city; Height (m) / ft = metres; Floors = n99; Year = year; Architect = person; Status = yesno; Street address = surname
church: Parish (prestegjeld) = surname; Sub-parish (sogn) = surname; Church name = title; Year built = year; Location of the church = city; Built = year; Listed = date
bridge: Name = surname; Location = city; Built = year; Type = shiptype; County = county; Span = metres
ship: Date = date; Ship = ship; Type = shiptype; Nationality = nationality; Tonnage ( GRT ) = people; Fate = fate; Captain = person; Location = country
ship: Ship Name = ship; Pennant = prodcode; Builder = company; Laid down = date; Launched = date; Commissioned = date; Home port = city; Decommissioned = year
ship: Name = ship; Flag = country; Port of registry = city; Propulsion = engine; Displacement = people; Beam = metres; Crew = n500; Launched by = fate
locomotive: Number = n99; Builder = company; Type = loco; Date = year; Works number = people; Withdrawn = year; Class = letter; Gauge = metres
car: Model = model; Years = yearspan; Engine code = prodcode; Power = power; Torque = power; Displacement = engine; Fuel system = genre; Transmission = transmission
car: Manufacturer = company; Model = model; Transmission = transmission; Engine Capacity = people; Fuel Type = fuel; CO 2 g/km = n500; mpg-UK combined = density; mpg-UK urban (cold) = density; Green Rating = letter
bus: Order Year = year; Manufacturer = company; Model = model; Fleet Series (Quantity) = fleet; Powertrain (Engine/Transmission) = engine; Fuel Propulsion = fuel
aircraft: Model = model; First flight = date; Manufacturer = company; Number built = n500; Range (nmi) = people; Wingspan = metres; Engine = engine; Passengers = n500
airport: Rank = n40; City = city; Airport = airport; IATA = icao; ICAO = icao; Passengers = people; Carriers = airline; % Change 2008/09 = percent; Capacity in use = percent
processor: Model number = model; sSpec number = prodcode; Frequency = racetime; L2 cache = n500; Socket = model; TDP (W) = n150; Release date = date; Part number(s) = prodcode; Release price ( USD ) = money
software: Name = title; Version = viewers; License = letter; NTFS = yesno; FAT32 = yesno; ReFS = yesno; HPFS = yesno; Written in = language
storm: Name = storm; Dates active = date; Peak classification = category_storm; Windspeeds = power; Pressure = people; Areas affected = country; Damage (USD) = money; Deaths = n500
star: Star = star; Constellation = constellation; Distance ( ly ) = density; Stellar classification = letter; Apparent magnitude = viewers; Right ascension ( J2000 ) = racetime; Declination ( J2000 ) = topar
spacecraft: Launcher = model; Launch complex = prodcode; Flights = n40; Years = yearspan; Spacecraft = ship; Crew = initialed; Mass (kg) = people; Launch date = date
battle: Unit = unit; Commander = person; Complement = people; Killed = n150; Wounded = n150; Missing = n99
regiment: Regiment = unit; Colonel = person; County = county; Division = nickname; Strength = people; Mustered out = date
monarch: Name = given; Born-Died = yearspan; Reign began = date; Reign ended = date; Spouse = person; Title = role; Succession = place
pageant: Year = year; Miss {country} = person; 1st Runner-up = person; 2nd Runner-up = person; Hometown = city; Age = age; Height = height; Special awards = category
contestant: Name = person; Age = n40; Hometown = city; Tribe = nickname; Finish = place; Total votes = n20; Celebrity = person; Famous for = office; Entered = yesno
couple: Couple = initialed; Style = dance; Music = title; Score = score; Result = awardresult; Week # = n20; Audience choice = title; Judge = surname
chess: Rank = n20; Prev = n40; Player = person; Rating = n500; Chng = topar; Elo = people; Wins = n20; Points = n20
curling: Skip = surname; Locale = state; W = n9; L = n9; PF = n99; PA = n99; Ends Won = n40; Ends Lost = n40; Blank Ends = n9; Stolen Ends = n9; Shot Pct. = percent
crew: Crew = college; Open 1st VIII = nickname; Open 2nd VIII = nickname; U16 1st VIII = nickname; U16 2nd VIII = nickname; U15 1st IV = nickname; U15 2nd IV = nickname
stage: Stage = n20; Winner = person; General classification = person; Points classification = person; Mountains classification = person; Team classification = constructor; Course = route; Distance = density
boxer: Champion = person; Date Won = date; Date Lost = date; Defenses = n20; Division = weightclass; Location = city; Reign = n9; Days held = n500
cricketer: Rank = n20; Runs = n500; Player = person; Opponent = country; Venue = venue; Season = season; Innings = n99; 100s = n9; Margin = margin; Wickets = n150; Best Bowling = score
drug: Drug = chemical; Indication = disease; Approval date = date; Company = company; Dose (mg) = n500; Half-life = racetime; Trial phase = place
element: Formula = formula; Notation = formula; T c (K) = density; Crystal structure = crystal; No. of Cu-O planes in unit cell = n9; Density (g/cm³) = viewers; Melting point = n500
language: Language = language; Native speakers = people; Family = range; Word = chemical; Plural = chemical; Stem (non-truncating) = chemical; Country = country
coin: Year = year; Theme = coin; Artist = person; Mintage = people; Issue Price = money; Special Notes = yesno; Finish = color; Composition = chemical
bank: Year = season; Revenue (US $million) = people; Net profit (US $m) = n500; Total assets = money; Employees = people; Share price = viewers; Auditor = company
population: Year = year; Population = people; Live births = people; Deaths = people; Natural change = topar; Crude birth rate (per 1000) = viewers; Crude death rate (per 1000) = viewers; Fertility rates = viewers
census: Census Year = year; Males = people; Females = people; Jews = people; Muslims = people; % of total = percent; Hispanic (%) = percent
energy: Country = country; Renewable electricity (GWh) = people; % renewable = percent; Wind power = density; Hydropower = density; Year = year; Total = people
hand: Hand = card; 1 credit = n500; 2 credits = n500; 3 credits = n500; 4 credits = people; 5 credits = people
route: Route = route; Length (mi) = density; From = city; To = city; Opened = year; Operator = airline; Notes = yesno; Major junctions = route
train: Number = n500; Station = city; Line = route; Opened = date; Platforms = n9; Zone = n9; Travel time (min) = n99; Managed by = company; Platform height = metres
tv schedule: 7:00 = title; 7:30 = title; 8:00 = title; 8:30 = title; 9:00 = title; 10:00 PM = title; Network = network
character: Name = role; Voiced by = person; First Appearance = title; Original cast = person; Revival Cast, 2010 = person; Species = species; Costume role = role; Duration = yearspan
book: Title = title; Author = person; Publisher = company; ISBN = people; Pages = n500; Published = date; Language = language; Illustrator = person
museum: Object = coin; Museum = title; Location = city; Dating = year; Material = chemical; Acquired = year; Dimensions (cm) = metres
weather: City = city; January °F = n99; July °F = n99; Average annual rainfall ( mm ) = n500; Snow (days/year) = n40; Storm (days/year) = n20; Sunlight (hours/year) = people
plant: Plant = surname; Location = city; Unit = n9; Gross Capacity (MW) = n500; Commissioned = date; Reactor type = letter; Throughput = people
company: Rank = n40; Company = company; Headquarters = city; Industry = office; Sales (billion $) = viewers; Profits (billion $) = viewers; Market Value (billion $) = density; Founded = year
""")
