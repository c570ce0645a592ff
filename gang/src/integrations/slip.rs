//! Names that were perhaps meant to be annotations of ours: one that does not exist, or a label where an annotation belongs. What they ask
//! for would else be passed over in silence, and the pod go its way alone.

use gantry_api::names;

use super::PodView;
use super::own::KNOWN;
use super::value::{fault, nearest, shown};
use super::view::{OURS, of_ours};
use crate::terms::Fault;

/// What names of ours begin with that are about gangs, or were meant to be.
const BEGINNINGS: [&str; 3] = ["gang", "min", "max"];

/// By what a name begins that is given to one of ours elsewhere, or by mistake, behind `gang` or without it.
const MEANT: [(&str, &str); 9] = [
    ("min", names::GANG_MIN_ANNOTATION),
    ("size", names::GANG_MIN_ANNOTATION),
    ("member", names::GANG_MIN_ANNOTATION),
    ("max", names::GANG_MAX_ANNOTATION),
    ("name", names::GANG_ANNOTATION),
    ("required", names::GANG_REQUIRED_LEVEL_ANNOTATION),
    ("preferred", names::GANG_PREFERRED_LEVEL_ANNOTATION),
    ("slice", names::GANG_SLICE_ANNOTATION),
    ("arrival", names::GANG_ARRIVAL_ANNOTATION),
];

/// Whether a name of our domain, given without it, is about gangs or was perhaps meant to be.
pub(super) fn is_about_gangs(name: &str) -> bool {
    let begins = |with: &&str| {
        let beginning = name.get(..with.len());
        beginning.is_some_and(|beginning| beginning.eq_ignore_ascii_case(with))
    };
    BEGINNINGS.iter().any(begins) || without_gang(name).is_some()
}

/// An annotation of our domain, given without it, that does not exist.
pub(super) fn annotation(name: &str) -> Fault {
    let place = format!("annotation {}/{name}", names::GROUP);
    fault(place, unknown("no annotation of ours", name))
}

/// What is wrong with the labels of a pod, which none of ours is.
pub(super) fn labels<'a>(pod: &PodView<'a>) -> impl Iterator<Item = Fault> {
    let pod = *pod;
    of_ours(pod.labels).filter_map(move |(name, text)| {
        let short = &name[OURS.len()..];
        is_about_gangs(short)
            .then(|| label(short, text, pod.annotation(name)))
            .flatten()
    })
}

/// A label of our domain, given without it. One that says the same as the annotation of its name is there for selectors, and says nothing
/// wrong.
fn label(name: &str, text: &str, annotated: Option<&str>) -> Option<Fault> {
    if annotated == Some(text) {
        return None;
    }
    let known = KNOWN.iter().any(|known| bare(known) == name);
    let words = match annotated.filter(|_| known) {
        Some(said) => format!(
            "{} is not what the annotation says, which is {}: only annotations are read; remove the label, or say the same",
            shown(text),
            shown(said)
        ),
        None if known => "only annotations are read: move it to metadata.annotations of the pod".to_owned(),
        None => unknown("only annotations are read, and none is called so", name),
    };
    Some(fault(format!("label {}/{name}", names::GROUP), words))
}

fn unknown(what: &str, name: &str) -> String {
    let known = KNOWN.map(bare);
    // By its beginning rather than by its letters: `gang-name` is nearer to `gang-rank` than to anything else.
    let meant = by_beginning(name)
        .or_else(|| without_gang(name))
        .or_else(|| nearest(name, &known));
    let meant = meant.map_or_else(String::new, |name| format!("; did you mean `{name}`?"));
    format!("{what}; there are {}{meant}", known.join(", "))
}

fn by_beginning(name: &str) -> Option<&'static str> {
    let small = name.to_ascii_lowercase();
    let rest = small.strip_prefix("gang").unwrap_or(&small);
    let rest = rest.trim_start_matches(['-', '_', '.']);
    let mut meant = MEANT.iter().filter(|(begins, _)| rest.starts_with(begins));
    meant.next().map(|(_, name)| bare(name))
}

/// `gang-rank` of `rank`.
fn without_gang(name: &str) -> Option<&'static str> {
    let mut known = KNOWN.iter().map(|known| bare(known));
    known.find(|known| {
        let rest = known.strip_prefix("gang-");
        rest.is_some_and(|rest| rest.eq_ignore_ascii_case(name))
    })
}

/// A name of ours without the domain.
fn bare(name: &'static str) -> &'static str {
    name.split_once('/').map_or(name, |(_, bare)| bare)
}
