"""Biology and chemistry: terms to define, textbook sections to write, exercises to solve."""
# ruff: noqa: E501  (word lists)

from __future__ import annotations

from random import Random

from .domain import Domain, PublicSet
from .grammar import Grammar, articles, lines, pick, rules

_RULES = rules("""
    side: anterior | posterior | lateral | medial | superior | inferior | deep | superficial | internal | external | common | left | right
    region: femoral | tibial | radial | ulnar | brachial | carotid | renal | hepatic | gastric | splenic | pulmonary | iliac | thoracic | cranial | facial
        | lumbar | sacral | cervical | ovarian | testicular | coronary | mesenteric | subclavian | axillary | popliteal | cerebral | temporal
        | maxillary | mandibular | occipital | vertebral | intercostal | peroneal | phrenic | sciatic | pudendal | optic | vestibular | palatine
    vessel: artery | vein | nerve | ligament | plexus | branch | fossa | foramen | canal | notch | process | crest | surface | lymph node
    action: flexor | extensor | abductor | adductor | levator | depressor | tensor | opponens
    part: hallucis | digitorum | pollicis | carpi radialis | carpi ulnaris | digiti minimi | scapulae | labii superioris | palati | indicis
    size: longus | brevis | magnus | minor | major | profundus | superficialis
    cell: osteoblast | osteoclast | astrocyte | neutrophil | basophil | macrophage | melanocyte | keratinocyte | chondrocyte | fibroblast | erythrocyte
        | platelet | lymphocyte | oocyte | spermatid | podocyte | enterocyte | hepatocyte | Schwann cell | mast cell | goblet cell | stem cell
    hormone: insulin | glucagon | cortisol | aldosterone | oxytocin | prolactin | thyroxine | epinephrine | melatonin | ghrelin | leptin | renin
        | erythropoietin | calcitonin | gastrin | secretin | progesterone | estradiol | testosterone | inhibin
    organelle: ribosome | mitochondrion | nucleolus | lysosome | peroxisome | Golgi apparatus | centriole | cytoskeleton | rough endoplasmic reticulum
    prefix: hyper | hypo | poly | peri | endo | epi | sub | intra | pre | iso | macro | micro
    stem: tonic | natremia | kalemia | glycemia | capnia | cardium | dermis | osteum | metrium | neurium | uria | plasia | trophy | volemia | pnea
    anatomy: {side} {region} {vessel} | {region} {vessel} | {action} {part} {size} | {action} {part} | {cell} | {hormone} | {organelle} | {prefix}{stem}
        | {region} arteries | {region} veins | {region} nerves | {region} lymph nodes | {side} {region} {vessel} | {process} | {tissue} | {region} region | {hormone} receptor | {cell} precursor
    process: phagocytosis | apoptosis | mitosis | meiosis | hemostasis | homeostasis | transcription | translation | glycolysis | exocytosis | ovulation
        | gluconeogenesis | depolarization | peristalsis | ossification | osmosis | diffusion | vasodilation | inspiration | deglutition
    tissue: hyaline cartilage | compact bone | simple squamous epithelium | areolar connective tissue | smooth muscle | transitional epithelium
        | spongy bone | adipose tissue | stratified columnar epithelium | cardiac muscle | nervous tissue | elastic cartilage
    quality: molar | standard | partial | atomic | ionic | effective | theoretical | specific | electron | nuclear | bond | activation | free | lattice
        | critical | vapor | equilibrium | formal | absolute | average | net | covalent | acid | base | redox | rate | solubility
    quantity: mass | pressure | energy | charge | radius | enthalpy | entropy | concentration | volume | temperature | constant | density | yield | number
        | potential | reaction | capacity | weight | order | equation | bond | law | product | point | configuration | affinity
    chemical: {quality} {quantity} | {quality} {quantity} | isotope | isomer | alkane | alkyne | ester | ketone | ligand | catalyst | titration | electrolyte
        | buffer | anode | cathode | polymer | halide | oxide | orbital | photon | colloid | emulsion | enthalpy | entropy | stoichiometry | molality
        | {surname}'s law | {element} {compound} | Lewis {thing} | Brønsted-Lowry {thing} | {quality} {quantity} | hydrogen bond | noble gas
    thing: acid | base | structure | symbol | diagram
    surname: Boyle | Charles | Avogadro | Dalton | Henry | Hess | Raoult | Faraday | Graham | Amontons | Coulomb | Hund
    element: sodium | calcium | magnesium | copper | iron | zinc | silver | lead | nickel | potassium | aluminum | barium | lithium | tin | cobalt
        | chromium | manganese | carbon | nitrogen | sulfur | phosphorus | silicon | chlorine | bromine | iodine | fluorine | oxygen | titanium
    compound: oxide | chloride | sulfate | nitrate | carbonate | hydroxide | phosphate | bromide | sulfide | acetate | iodide | fluoride
    metal: Na | K | Li | Mg | Ca | Ba | Zn | Cu | Fe | Ni | Al | Ag | Pb | Sn | Co | Cr | Mn | Sr | Cd
    formula: NaCl | {metal}SO4 | {metal}O | {metal}Cl2 | H2SO4 | HNO3 | NH3 | CO2 | {metal}CO3 | {metal}(OH)2 | C{1-8}H{2-18} | C6H12O6 | SO2 | PCl5
        | {metal}2O3 | {metal}Br2 | HClO4 | CH3OH | C2H5OH | K2Cr2O7 | N2O4 | {metal}I2 | {metal}(NO3)2 | H3PO4 | CCl4 | Na2CO3 | HF
    microbe: Salmonella | Streptococcus | Staphylococcus | Escherichia | Mycobacterium | Clostridium | Candida | Plasmodium | Giardia | Vibrio
        | Herpesvirus | Influenza Virus | Pseudomonas | Helicobacter | Bacillus | Listeria | Chlamydia | Aspergillus | Rabies Virus | Borrelia
    bodypart: Skin | Eyes | Respiratory Tract | Nervous System | Urinary Tract | Digestive System | Blood | Oral Cavity | Heart | Reproductive System
        | Lymphatic System | Skull | Vertebral Column | Pelvis | Forearm | Hand | Foot | Abdomen | Neck | Kidney | Liver | Inner Ear | Brain
    micro: {microbe} Infections | The Life Cycle of {microbe} | Bacterial Infections of the {bodypart} | {microbe} | Structure of {microbe}
        | Viral Diseases of the {bodypart} | Culturing {microbe} | Treatment of {microbe} | The Gram Stain | Biofilms | Antibiotic Resistance
        | Fungal Diseases of the {bodypart} | Enzyme Inhibition | Horizontal Gene Transfer | Vaccines against {microbe} | Lytic and Lysogenic Cycles
        | Flagella and Pili | Identification of {microbe} | Transmission of {microbe} | Toxins of {microbe} | The Immune Response to {microbe}
    micropart: Bacterial Infections of the {bodypart} | Viral Infections of the {bodypart} | Microbial Growth | Antimicrobial Drugs | Cell Structure
        | Laboratory Diagnosis | Parasitic Infections of the {bodypart} | Microscopes | Adaptive Immunity | Epidemiology | Microbial Genetics
    body: Muscles of the {bodypart} | Arteries of the {bodypart} | Development of the {bodypart} | Aging and the {bodypart} | Disorders of the {bodypart}
        | Nerves of the {bodypart} | Functions of the {bodypart} | Blood Supply of the {bodypart} | Bones of the {bodypart} | Veins of the {bodypart}
        | The Role of {Hormone} | {Hormone} and Homeostasis | Structure of the {organelle} | Hormonal Control of the {bodypart} | Joints of the {bodypart}
        | {Process} | Layers of the {bodypart} | Histology of the {bodypart} | {Tissue} | Cells of the {bodypart}
    bodychapter: Anatomy of the {bodypart} | The {bodypart} | Tissues | Hormones | Circulatory Pathways | Embryonic Development | Muscle Contraction
        | Homeostasis | The Cellular Level of Organization | Reflexes and Pathways | Metabolism and Nutrition | Disorders of the {bodypart}
    chem: {Element} {compound} | Compounds of {Element} | Reactions of {Element} with Acids | The {quality} {quantity} | Calculating {quality} {quantity}
        | Production of {element} {compound} | Properties of {Element} | Determining the {quality} {quantity} | Uses of {Element} | Occurrence of {Element}
        | {surname}'s Law | {chemical} and Temperature | Naming {element} compounds | Alkenes | Limiting Reactants | Electrolysis of {element} {compound}
    chemchapter: Chemical Equilibria | Thermochemistry | The Gas Laws | Reaction Rates | Acids and Bases | Electrochemistry | Solutions and Colloids
        | Molecular Structure | Organic Chemistry | Nuclear Chemistry | Stoichiometry | Metals and Metalloids | Nonmetals | Liquids and Solids
    pick3: (a) {formula}\\n(b) {formula}\\n(c) {formula}
    list: {pick3} | {pick3}\\n(d) {formula} | {pick3}\\n(d) {formula}\\n(e) {formula}
    amount: {1-90}.{0-9} | 0.{10-900} | {1-9}.{10-99} | {10-500}
""")

_TERMS = lines("""
    In anatomy and physiology, what does the term "{anatomy}" mean?
    In anatomy and physiology, what does the term "{anatomy}" mean?
    In anatomy and physiology, what does the term "{anatomy}" mean?
    In chemistry, what does the term "{chemical}" mean?
    In chemistry, what does the term "{chemical}" mean?
""")
_SECTIONS = lines("""
    Write a short microbiology textbook section on "{Micro}" (from the chapter part "{Micropart}").
    Write a short anatomy and physiology textbook section on "{Body}" (from the chapter part "{Bodychapter}").
    Write a short chemistry textbook section on "{Chem}" (from the chapter part "{Chemchapter}").
""")
_EXERCISES = lines("""
    How many moles of {formula} are <contained|there> in {amount} g of the compound?
    What is the <mass|number of moles> of {formula} in {amount} mL of a {amount} M solution?
    Calculate the molar mass of each of the following:\\n{list}
    Determine the oxidation number of each element in the following compounds:\\n{list}
    Name the following compounds:\\n{list}
    <Draw|Write> the Lewis structure for each of the following:\\n{list}
    Is each of these compounds ionic or covalent?\\n{list}
    What is the percent composition by mass of {element} in {formula}?
    A sample of gas <occupies|has a volume of> {amount} L at {10-90} °C and {0-3}.{10-99} atm. <What volume will it have|Find its volume> at {100-300} °C and {4-9}.{0-9} atm?
    Calculate the pH of a {amount} M solution of <HCl|NaOH|{formula}>.
    How much heat is needed to raise the temperature of {amount} g of <water|{element}> from {10-30} °C to {40-95} °C?
    What is the <molality|molarity> of a solution made from {amount} g of {formula} and {50-900/25} g of water?
    Write <a balanced equation|the net ionic equation> for the reaction of {element} with <water|oxygen|an excess of hydrochloric acid|{formula}>.
    Write the electron configuration of <an atom of|the most common ion of> {element}.
    The half-life of a <radioactive isotope|first-order reaction> is {2-90} <days|minutes|hours>. How much of a {amount}-g sample is left after {100-400/20} <days|minutes|hours>?
    Which of these has the higher boiling point, {formula} or {formula}? Explain.
    Why is {element} <more|less> reactive than {element}?
    Explain why {formula} is <soluble|insoluble> in water.
    Write the expression for the equilibrium constant of a reaction between {formula}(aq) and {formula}(aq).
    What volume of {amount} M {formula} is <required|needed> to neutralize {amount} mL of {amount} M <NaOH|HCl>?
    For a reaction, the rate doubles when the concentration of {formula} is doubled. What is the order with respect to {formula}?
    What is the function of the {organelle}?
    What are the functions of {hormone}?
    Describe the <structure|role|location> of the {region} {vessel}.
    Explain the difference between <a|the> {cell} and <a|the> {cell}.
    How does {hormone} affect the <kidney|heart|liver|bones|blood pressure|digestive tract>?
    Compare and contrast {tissue} and {tissue}.
    Why is {process} <important|necessary> for <the body|growth|survival|health>?
    Where would you <find|expect to find> {tissue}, and why?
    What would happen if {process} <stopped|were blocked|became too fast>?
    Discuss the <steps|stages|control> of {process}.
    What is the relationship between the {region} {vessel} and the {region} {vessel}?
    A patient has too <much|little> {hormone}. What symptoms would you expect?
    Describe how {cell}s <develop|respond to injury|communicate with each other>.
    What causes <an increase|a decrease> in {hormone} <secretion|levels>?
    Which {vessel} supplies the {side} part of the {region} region?
    ________ is the hormone that <opposes|works together with> {hormone}.
    The {cell} is found in the ________.
    {Microbe} is <an example of|classified as> a ________.
    How is {microbe} transmitted, and how can infection be prevented?
    Which stain would you use to identify {microbe}?
    Name three <diseases|symptoms> caused by {microbe}.
    Explain how {microbe} <avoids|evades> the immune system.
""")
_GRAMMAR = Grammar(_RULES)


def _sample(random: Random) -> str:
    kind = random.random()
    templates = _TERMS if kind < 0.62 else _SECTIONS if kind < 0.82 else _EXERCISES
    return articles(_GRAMMAR.expand(random, pick(random, templates)).replace("\\n", "\n"))


DOMAIN = Domain(
    name="biochem",
    description="anatomy, microbiology and chemistry: terms, textbook sections, exercises",
    public=PublicSet(
        id="allenai/sciq",
        config=None,
        split={"train": "train", "test": "test"},
        columns={"question": "question"},
        template="{question}",
        licence="CC-BY-NC-3.0",
        citation="Welbl et al., Crowdsourcing Multiple Choice Science Questions (2017)",
    ),
    sample=_sample,
)
