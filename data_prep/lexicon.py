"""Names of people, places and times that several domains share."""
# ruff: noqa: E501  (word lists)

from __future__ import annotations

from .grammar import listing

WOMEN = listing("""
    Alice, Amara, Amelia, Anita, Anna, Ariana, Beatrice, Bella, Brianna, Camila, Carla, Carmen, Celia, Chloe, Clara, Daisy, Dana,
    Deborah, Denise, Diana, Elena, Eliza, Ella, Emily, Emma, Erica, Esther, Eva, Fatima, Fiona, Gabriela, Georgia, Gina, Grace, Hannah,
    Hazel, Heidi, Helen, Holly, Irene, Isabel, Ivy, Jackie, Janet, Jasmine, Jenna, Jill, Joan, Judy, Julia, June, Kara, Karen, Katie,
    Kayla, Kelly, Kendra, Kim, Lara, Laura, Leah, Lena, Lily, Linda, Lisa, Lola, Lucy, Mabel, Maria, Marta, Mary, Maya, Megan, Melissa,
    Mia, Mila, Monica, Nadia, Nancy, Naomi, Natalie, Nina, Nora, Olivia, Pam, Paula, Penny, Priya, Rachel, Rebecca, Rita, Rosa, Ruby,
    Ruth, Sally, Samantha, Sandra, Sara, Selena, Sharon, Sofia, Stella, Sue, Tanya, Tessa, Tina, Valerie, Vera, Wendy, Yolanda, Zoe""")

MEN = listing("""
    Aaron, Adam, Ahmed, Alan, Albert, Alex, Andrew, Anton, Arthur, Ben, Bill, Bob, Brad, Brandon, Brian, Bruce, Caleb, Carl, Carlos,
    Charlie, Chris, Colin, Connor, Curtis, Dale, Damian, Daniel, Darren, David, Dean, Dennis, Derek, Diego, Donald, Doug, Dylan, Eddie,
    Edward, Eli, Emilio, Eric, Ethan, Evan, Felix, Frank, Fred, Gary, George, Gordon, Grant, Greg, Hank, Harold, Harry, Hassan, Henry,
    Hugo, Ian, Isaac, Ivan, Jack, Jacob, Jake, James, Jason, Jeff, Jerry, Jim, Joe, John, Jonah, Jordan, Jose, Josh, Juan, Julian,
    Justin, Keith, Ken, Kevin, Kyle, Larry, Leo, Liam, Logan, Louis, Lucas, Luke, Malik, Marco, Marcus, Mario, Mark, Martin, Mason,
    Matt, Max, Michael, Miguel, Mike, Nathan, Neil, Nick, Noah, Oliver, Omar, Oscar, Owen, Pablo, Patrick, Paul, Pedro, Peter, Philip,
    Ralph, Randy, Ravi, Ray, Ricardo, Rick, Robert, Roger, Ron, Roy, Russell, Ryan, Sam, Scott, Sean, Simon, Stan, Steve, Stuart,
    Terry, Theo, Tim, Todd, Tom, Tony, Travis, Trevor, Tyler, Victor, Vince, Walter, Wayne, Will, Xavier, Zach""")

SURNAMES = listing("""
    Abbott, Adams, Allen, Alvarez, Andersen, Baker, Barnes, Becker, Bell, Bennett, Bergman, Bianchi, Bishop, Black, Boyd, Brooks,
    Brown, Bryant, Burke, Burns, Butler, Byrne, Campbell, Carlson, Carter, Castillo, Chapman, Chen, Clark, Cole, Collins, Conti, Cook,
    Cooper, Costa, Cox, Crawford, Cruz, Cunningham, Dalton, Davies, Davis, Dawson, Delgado, Diaz, Dixon, Doyle, Duncan, Dunn, Edwards,
    Elliott, Ellis, Evans, Ferguson, Fernandez, Fischer, Fisher, Fleming, Ford, Foster, Fowler, Fox, Franklin, Fraser, Garcia, Gibson,
    Gomez, Gonzalez, Graham, Grant, Gray, Green, Griffin, Gupta, Hall, Hamilton, Hansen, Harper, Harris, Hart, Harvey, Hayes,
    Henderson, Hernandez, Hill, Hoffman, Holmes, Horvat, Howard, Hughes, Hunt, Hunter, Ivanov, Jackson, Jacobs, Jenkins, Jensen,
    Johansson, Johnson, Jones, Jordan, Kaplan, Kelly, Kennedy, Khan, Kim, King, Klein, Knight, Kowalski, Kumar, Larsen, Lawson, Lee,
    Lewis, Lindberg, Logan, Long, Lopez, Lynch, Mackenzie, Marino, Marshall, Martin, Martinez, Mason, Matthews, McCarthy, McDonald,
    Mendoza, Meyer, Miller, Mitchell, Moore, Morales, Moreau, Morgan, Morris, Morrison, Müller, Murphy, Murray, Myers, Nakamura,
    Nelson, Newman, Nguyen, Nielsen, Novak, O'Brien, O'Connor, Oliver, Olsen, Ortiz, Owens, Palmer, Park, Parker, Patel, Pearson,
    Perez, Perry, Peters, Petrov, Phillips, Pierce, Porter, Powell, Price, Quinn, Ramirez, Reed, Reid, Reyes, Reynolds, Rice, Richards,
    Rivera, Roberts, Robertson, Robinson, Rodriguez, Rogers, Romero, Rose, Ross, Rossi, Russell, Ryan, Sanchez, Sanders, Santos, Sato,
    Schmidt, Schneider, Schultz, Scott, Shaw, Silva, Simmons, Simpson, Singh, Smith, Snyder, Spencer, Stanley, Stevens, Stewart,
    Stone, Sullivan, Suzuki, Tanaka, Taylor, Thomas, Thompson, Torres, Tucker, Turner, Vargas, Vasquez, Walker, Wallace, Walsh, Wang,
    Ward, Warren, Watson, Weaver, Weber, Webb, Wells, West, White, Williams, Wilson, Wong, Wood, Wright, Wu, Young, Zhang, Zimmerman""")

COUNTRIES = listing("""
    Algeria, Argentina, Australia, Austria, Azerbaijan, Belarus, Belgium, Bolivia, Brazil, Bulgaria, Canada, Chile, China, Colombia,
    Costa Rica, Croatia, Cuba, Cyprus, Czech Republic, Denmark, Ecuador, Egypt, England, Estonia, Ethiopia, Finland, France, Georgia,
    Germany, Ghana, Great Britain, Greece, Hungary, Iceland, India, Indonesia, Iran, Ireland, Israel, Italy, Jamaica, Japan,
    Kazakhstan, Kenya, Latvia, Lithuania, Malaysia, Mexico, Mongolia, Morocco, Netherlands, New Zealand, Nigeria, North Korea, Norway,
    Pakistan, Paraguay, Peru, Philippines, Poland, Portugal, Qatar, Romania, Russia, Scotland, Senegal, Serbia, Singapore, Slovakia,
    Slovenia, South Africa, South Korea, Soviet Union, Spain, Sweden, Switzerland, Thailand, Tunisia, Turkey, Ukraine, United Kingdom,
    United States, Uruguay, Uzbekistan, Venezuela, Vietnam, Wales, West Germany, Zimbabwe""")

NATIONALITIES = listing("""
    American, Argentine, Australian, Belgian, Brazilian, British, Canadian, Chinese, Croatian, Dutch, Egyptian, English, Finnish,
    French, German, Greek, Indian, Irish, Italian, Japanese, Kenyan, Korean, Mexican, Norwegian, Polish, Portuguese, Russian, Scottish,
    Spanish, Swedish, Swiss, Turkish, Ukrainian, Vietnamese""")

CITIES = listing("""
    Adelaide, Albany, Amsterdam, Ankara, Athens, Atlanta, Auckland, Austin, Baltimore, Bangkok, Barcelona, Basel, Beijing, Belfast,
    Belgrade, Berlin, Birmingham, Bologna, Boston, Brisbane, Brussels, Bucharest, Budapest, Buenos Aires, Buffalo, Cairo, Calgary,
    Cape Town, Cardiff, Charlotte, Chicago, Cincinnati, Cleveland, Columbus, Copenhagen, Dallas, Denver, Detroit, Dublin, Edinburgh,
    Edmonton, Florence, Frankfurt, Geneva, Glasgow, Hamburg, Helsinki, Hong Kong, Houston, Indianapolis, Istanbul, Jacksonville,
    Jakarta, Johannesburg, Kansas City, Kiev, Kraków, Lagos, Las Vegas, Leeds, Leipzig, Lima, Lisbon, Liverpool, London, Los Angeles,
    Lyon, Madrid, Manchester, Manila, Marseille, Melbourne, Memphis, Mexico City, Miami, Milan, Milwaukee, Minneapolis, Montreal,
    Moscow, Mumbai, Munich, Nagoya, Naples, Nashville, New Orleans, New York, Newcastle, Nottingham, Oakland, Osaka, Oslo, Ottawa,
    Paris, Perth, Philadelphia, Phoenix, Pittsburgh, Portland, Porto, Prague, Rio de Janeiro, Rome, Rotterdam, Sacramento,
    Saint Petersburg, San Antonio, San Diego, San Francisco, San José, Santiago, São Paulo, Sarajevo, Seattle, Seoul, Seville,
    Shanghai, Sheffield, Sofia, Stockholm, Stuttgart, Sydney, Tampa, Tashkent, Tehran, Tokyo, Toronto, Tulsa, Turin, Valencia,
    Vancouver, Vienna, Vilnius, Warsaw, Washington, Wellington, Winnipeg, Zagreb, Zürich""")

STATES = listing("""
    Alabama, Alaska, Arizona, Arkansas, California, Colorado, Connecticut, Delaware, Florida, Georgia, Hawaii, Idaho, Illinois,
    Indiana, Iowa, Kansas, Kentucky, Louisiana, Maine, Maryland, Massachusetts, Michigan, Minnesota, Mississippi, Missouri, Montana,
    Nebraska, Nevada, New Hampshire, New Jersey, New Mexico, New York, North Carolina, North Dakota, Ohio, Oklahoma, Oregon,
    Pennsylvania, Rhode Island, South Carolina, South Dakota, Tennessee, Texas, Utah, Vermont, Virginia, Washington, West Virginia,
    Wisconsin, Wyoming""")

MONTHS = listing("January, February, March, April, May, June, July, August, September, October, November, December")
DAYS = listing("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
COLORS = listing("red, blue, green, yellow, black, white, orange, purple, pink, brown, silver, gray")

NAMES: dict[str, tuple[str, ...]] = {
    "woman": WOMEN,
    "man": MEN,
    "given": WOMEN + MEN,
    "surname": SURNAMES,
    "person": ("{given} {surname}",),
    "country": COUNTRIES,
    "nationality": NATIONALITIES,
    "city": CITIES,
    "state": STATES,
    "month": MONTHS,
    "day": DAYS,
    "color": COLORS,
}
