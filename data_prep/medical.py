"""Medical: short questions about a condition, and research questions to answer from an abstract."""
# ruff: noqa: E501  (one sentence a line)

from __future__ import annotations

from random import Random

from .domain import Domain, PublicSet
from .grammar import Grammar, articles, lines, pick, rules, tidy
from .lexicon import NAMES

_RULES = rules("""
    organ: renal | hepatic | cardiac | pulmonary | gastric | ovarian | thyroid | retinal | cerebral | pancreatic | colorectal | spinal | cutaneous
        | bladder | bone | adrenal | esophageal | corneal | prostate | uterine | laryngeal | biliary
    trouble: carcinoma | fibrosis | hypoplasia | dysplasia | atrophy | dystrophy | cyst | neuropathy | stenosis | insufficiency | aneurysm | sarcoma
        | abscess | hypertension | hemorrhage | infection | failure | tumors | lymphoma | agenesis | artery disease | edema
    manner: familial | congenital | juvenile | hereditary | idiopathic | X-linked | autosomal recessive | progressive | adult-onset | neonatal
        | chronic | acute | infantile | primary | secondary | benign | severe | late-onset | autoimmune
    root: ataxia | myopathy | ichthyosis | anemia | epilepsy | deafness | cataract | dystonia | leukodystrophy | osteopetrosis | nephropathy
        | cardiomyopathy | thrombocytopenia | neutropenia | paraplegia | polyneuropathy | lipodystrophy | encephalopathy | hypothyroidism
        | immunodeficiency | glomerulonephritis | pancreatitis | vasculitis | retinitis pigmentosa | epidermolysis bullosa | night blindness
    enzyme: glucose-6-phosphate dehydrogenase | biotinidase | arginase | lactase | propionyl-CoA carboxylase | factor X | factor XIII | protein C
        | carnitine | ornithine transcarbamylase | adenosine deaminase | alpha-1 antitrypsin | vitamin D | copper | magnesium | thiamine | iron
        | medium-chain acyl-CoA dehydrogenase | pyruvate kinase | galactokinase | lipoprotein lipase | growth hormone | IgA | zinc
    gene: {letter}{letter}{letter}{1-19} | COL{1-9}A{1-3} | SLC{1-39}A{1-9} | {letter}{letter}P{1-9} | MYH{2-11} | GJB{2-6} | KCN{letter}{1-5}
    letter: A | B | C | D | E | F | G | H | K | L | M | N | P | R | S | T | V
    common: asthma | type 2 diabetes | high blood pressure | migraine | gout | psoriasis | osteoporosis | rheumatoid arthritis | glaucoma | kidney stones
        | pneumonia | shingles | Lyme disease | celiac disease | gallstones | hepatitis B | hepatitis C | heart attack | stroke | sickle cell disease
        | atrial fibrillation | sleep apnea | chronic kidney disease | Crohn's disease | Parkinson's disease | multiple sclerosis | tuberculosis
        | malaria | bronchitis | anemia | ulcerative colitis | lupus | endometriosis | scoliosis | narcolepsy | vertigo | carpal tunnel syndrome
        | restless legs syndrome | dry eye | cataract | hearing loss | obesity | depression | food poisoning | urinary tract infections | sinusitis
        | deep vein thrombosis | peripheral artery disease | heart failure | melanoma | breast cancer | lung cancer | bladder cancer | leukemia
        | non-Hodgkin lymphoma | multiple myeloma | cervical cancer | prostate cancer | thyroid cancer | kidney cancer | oral cancer | bedbugs
    disease: {common} | {surname}-{surname} syndrome | {surname} syndrome | {surname} disease | {enzyme} deficiency | {organ} {trouble} | {manner} {root}
        | {manner} {organ} {trouble} | {root} type {1-9}{sub} | {surname}-{surname} disease | {gene}-related {root} | {root} with {root}
        | {manner} {enzyme} deficiency | {root} and {organ} {trouble} | {organ} {trouble} in children | childhood {organ} {trouble}
        | {manner} {root} type {1-8} | {surname} {root} | {1-22}q{11-36} deletion syndrome | {manner} {root}, {surname} type
    sub: A | B | C | D |  E
    unfit: diet and exercise | family history | low-fat meals | blood tests | donating a kidney | assisted living | quitting smoking | healthy aging
""")
_RULES["disease"] += ("{common}",) * 6

_QUESTIONS = lines("""
    What is (are) {Disease}?
    What is (are) {disease}?
    What is (are) {disease}?
    What is (are) {Disease}?
    What is (are) {disease}?
    What are the symptoms of {Disease}?
    What are the symptoms of {disease}?
    What are the symptoms of {Disease}?
    What are the treatments for {disease}?
    What are the treatments for {Disease}?
    Is {disease} inherited?
    Is {disease} inherited?
    What are the genetic changes related to {disease}?
    What are the genetic changes related to {disease}?
    How many people are affected by {disease}?
    How many people are affected by {disease}?
    What causes {Disease}?
    What causes {disease}?
    How to diagnose {Disease}?
    what research (or clinical trials) is being done for {Disease}?
    What is the outlook for {Disease}?
    Do you have information about {Common}
    Do you have information about {Unfit}
    Who is at risk for {Disease}?
    What to do for {Common}?
    How to prevent {Common}?
    What are the complications of {Common}?
    What are the stages of {Disease}?
""")

# Draws shared by the parts of one abstract: {p} patients, {d} disease, {t} treatment or exposure, {o} outcome, {n} how many.
_STUDY = rules("""
    patients: patients with {disease} | children with {disease} | women with {disease} | older adults | pregnant women | surgical patients
        | patients undergoing {operation} | adolescents | nurses | medical students | infants | primary care patients | critically ill patients
        | hospitalized patients | men with {disease} | preterm infants | patients with newly diagnosed {disease}
    operation: hip replacement | coronary bypass surgery | liver transplantation | laparoscopic cholecystectomy | colonoscopy | cataract surgery
        | tonsillectomy | hemodialysis | cesarean delivery | spinal fusion | radical prostatectomy | gastric bypass | thyroidectomy | hernia repair
    drug: metformin | aspirin | a statin | vitamin D | ketamine | dexamethasone | warfarin | propranolol | low-dose heparin | methotrexate | oxytocin
        | tranexamic acid | omeprazole | insulin | morphine | ibuprofen | erythropoietin | magnesium sulfate | botulinum toxin | rituximab
    treatment: {drug} | early mobilization | physical therapy | telephone follow-up | preoperative {drug} | routine ultrasound | a training programme
        | cognitive behavioral therapy | magnetic resonance imaging | {operation} | adjuvant chemotherapy | exercise | breast feeding | acupuncture
        | antibiotic prophylaxis | home visits | a low-carbohydrate diet | radiotherapy | routine screening | computed tomography | day surgery
    outcome: mortality | length of hospital stay | postoperative pain | quality of life | recurrence | complications | blood loss | readmission
        | survival | blood pressure | glycemic control | cognitive function | bone mineral density | depressive symptoms | satisfaction | birth weight
        | infection rates | functional recovery | sleep quality | the need for transfusion | left ventricular function | pain scores | fatigue
    marker: serum {protein} | {protein} expression | plasma {protein} levels | body mass index | heart rate variability | the neutrophil-lymphocyte ratio
        | {gene} polymorphism | bone mineral density | tumor size | C-reactive protein | waist circumference | the ASA score
    protein: ferritin | albumin | leptin | adiponectin | interleukin-6 | troponin | cystatin C | VEGF | procalcitonin | fibrinogen | homocysteine
    place: a tertiary care hospital | a university hospital | two district hospitals | a community clinic | an academic medical center | {1-40} general practices
        | an emergency department in {city} | a regional referral center | a national registry in {country}
    test: the chi-square test | Student's t test | logistic regression | Cox regression | the Mann-Whitney test | analysis of variance | Kaplan-Meier curves
    pvalue: P = .{10-99} | p<0.0{1-5} | P = 0.{100-900} | p = 0.00{1-9} | P<.001 | p=.{20-90}
    ci: {1-3}.{10-99}; 95% confidence interval [CI], 1.{10-40}-{4-7}.{10-99} | OR {1-4}.{0-9}, 95% CI {0-1}.{10-90} to {5-9}.{0-9} | HR 0.{40-90}, 95% CI 0.{10-39}-{1-2}.{10-99}
    span: {1-6} years | {2-36} months | {3-12} weeks | {2-30} days | {1990-2003} and {2004-2014}
""")
_AIM = lines("""
    To <determine|assess|examine|investigate|evaluate> <whether|if> {t} <affects|improves|reduces|influences> {o} in {p}.
    The <role|value|effect> of {t} in {p} <is|remains> <unclear|controversial|uncertain|poorly understood>. <We aimed to|This study aims to|The aim was to> <assess|evaluate> its effect on {o}.
    {T} is <widely|increasingly|often> used in {p}, but <little is known about|few studies have examined|there is limited evidence on> its <effect|influence> on {o}.
    We <hypothesized|tested the hypothesis> that {m} is <associated with|a predictor of|related to> {o} in {p}.
    <Previous|Several|Recent> studies have <suggested|reported> <an association between|a link between> {m} and {o}. <The purpose of this study was|Our objective was> to <confirm|examine> this <association|finding> in {p}.
    <The purpose of this study was to|We sought to|This study was performed to> compare {t} with {treatment} in {p}.
    <{O} is|Changes in {o} are> <a common problem|a major concern|an important issue> in {p}. <We|The authors> <examined|evaluated> the <influence|contribution> of {t}.
""")
_METHODS = lines("""
    A <retrospective|prospective|cross-sectional> <cohort study|analysis|review> was <performed|conducted> <at|in> {place} <between {1988-2003} and {2004-2014}|over {span}>.
    {n=24-900} {p} were <included|enrolled|studied|recruited>.
    <A total of|Altogether,> {n=40-2400} {p} were <included|identified|reviewed>, and {20-99} <served as controls|were excluded|were lost to follow-up>.
    Patients were <randomly assigned|randomized|allocated> to {t} <(n = {20-300})|> or <placebo|usual care|standard treatment> <(n = {20-300})|>.
    {O} <was|were> <measured|assessed|recorded> at baseline and after {span}.
    <Data|Information> on age, sex, {m}, and {o} <was|were> <collected|obtained> from <medical records|a questionnaire|interviews|a database>.
    <Univariate and multivariate|Statistical> analyses were performed with {test} <and {test}|>.
    The primary <endpoint|outcome> was {o}; secondary <endpoints|outcomes> were {outcome} and {outcome}.
    Two <groups|cohorts> were <compared|formed>: {p} who received {t} and those who did not.
    <Multivariable|Multiple> {logistic} was used to adjust for age, sex, and {marker}.
""")
_RESULTS = lines("""
    The mean age was {30-79}.{0-9} <years|+/- {2-14}.{0-9} years> <(range, {18-29}-{80-95})|>, and {31-79}% were <female|male|women>.
    {O} was <significantly|slightly|> <lower|higher|better|worse> with {t} than in <controls|the control group> ({10-60}.{0-9}% vs {5-70}.{0-9}%; {pvalue}).
    There was no <significant|> difference in {o} between the <two|> groups ({pvalue}).
    {T} was <associated with|an independent predictor of|related to> {o} ({ci}; {pvalue}).
    After adjustment for <confounders|age and sex>, the association <remained significant|was no longer significant|was attenuated> ({pvalue}).
    <Median|Mean> follow-up was {3-90} <months|weeks>. {Outcome} occurred in {3-60} patients ({2-40}%).
    {M} <correlated|did not correlate> with {o} (r = 0.{10-90}, {pvalue}).
    Of the {20-300} patients, {5-90} ({5-60}%) <had|developed|reported> <complications|{o}|an improvement>.
    The <sensitivity|specificity> was {50-99}% and the <positive|negative> predictive value was {40-98}%.
    {Outcome} and {outcome} were <similar|comparable|not different> <in both groups|between groups>.
    In <a subgroup|the subgroup> of <women|men|patients over {50-80} years>, the effect was <stronger|weaker|not seen>.
""")
_RESEARCH_QUESTION = lines("""
    Does {t} <improve|affect|reduce|influence|predict> {o} in {p}?
    Is {m} <associated with|a predictor of|related to> {o} in {p}?
    Is {t} <effective|safe|useful|necessary|justified> in {p}?
    Can {t} <reduce|improve|prevent> {o} in {p}?
    Do {p} benefit from {t}?
    {T} in {p}: <is it safe|does it matter|is it worthwhile|a useful approach|is there a difference>?
    Does {m} <influence|predict|reflect> {o} in {p}?
    {O} in {p}: <is there a role for|what is the effect of|does it depend on> {t}?
    Is there a <relationship|link> between {m} and {o} in {p}?
    Should {p} receive {t}?
""")
_LABELS = lines("""
    Background: | Methods: | Results:
    Objective: | Methods: | Results:
    Background: | Methods: | Results:
    Objectives: | Methods: | Results:
    Purpose: | Methods: | Results:
    Introduction: | Materials And Methods: | Results:
    Aims: | Patients And Methods: | Results:
    Objective: | Design: | Results:
    Background And Purpose: | Method: | Findings:
    Study Objective: | Setting: | Measurements And Main Results:
    Purpose: | Material And Methods: | Results:
""")
_GRAMMAR = Grammar(NAMES, _RULES, _STUDY, {"logistic": ("logistic regression", "linear regression", "Cox regression")})
_SHARED = {"p": "patients", "t": "treatment", "o": "outcome", "m": "marker"}


def _abstract(random: Random) -> str:
    bound = {name: _GRAMMAR.draw(random, rule) for name, rule in _SHARED.items()}

    def write(templates: tuple[str, ...], least: int, most: int) -> str:
        chosen = sorted(random.sample(range(len(templates)), random.randint(least, most)))  # in the order of the list
        return tidy(" ".join(_GRAMMAR.expand(random, templates[i], bound) for i in chosen))

    parts = (write(_AIM, 1, 2), write(_METHODS, 3, 6), write(_RESULTS, 3, 6))
    labels = pick(random, _LABELS).split(" | ")
    body = "\n".join(f"{label} {part}" for label, part in zip(labels, parts, strict=True))
    question = write(_RESEARCH_QUESTION, 1, 1)
    return f"Answer the research question from the abstract.\n\n{articles(body)}\n\nQuestion: {question[:1].upper()}{question[1:]}"


def _sample(random: Random) -> str:
    return _abstract(random) if random.random() < 0.38 else _GRAMMAR.expand(random, pick(random, _QUESTIONS))


DOMAIN = Domain(
    name="medical",
    description="questions about diseases, and research questions over abstracts",
    public=PublicSet(
        id="qiaojin/PubMedQA",
        config="pqa_labeled",
        split={"train": "train[:90%]", "test": "train[90%:]"},
        columns={"contexts": "context.contexts", "question": "question"},
        template="Answer the research question from the abstract.\n\n{contexts}\n\nQuestion: {question}",
        licence="MIT",
        citation="Jin et al., PubMedQA: A Dataset for Biomedical Research Question Answering (2019)",
    ),
    sample=_sample,
)
