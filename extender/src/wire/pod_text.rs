//! The pod of a call as text, for a second look at fields that few calls need.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The pod in the body of filter, prioritize or preempt. Nothing behind it is read: kube-scheduler writes the pod before
/// the nodes, which are most of the body.
pub fn pod_text(body: &[u8]) -> Option<&str> {
    let mut found = None;
    // It ends with an error as soon as the pod is found.
    let _ = serde_json::Deserializer::from_slice(body).deserialize_map(FindPod(&mut found));
    found
}

struct FindPod<'f, 'de>(&'f mut Option<&'de str>);

impl<'de> Visitor<'de> for FindPod<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the arguments of a verb")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            let value: &'de RawValue = map.next_value()?;
            if matches!(&*key, "Pod" | "pod") {
                *self.0 = Some(value.get());
                return Err(M::Error::custom("found"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_is_found_wherever_it_stands() {
        let pod = r#"{"metadata": {"name": "a\"}"}}"#;
        for body in [
            format!(r#"{{"Pod": {pod}, "NodeNames": ["a"]}}"#),
            format!(r#"{{"NodeNames": ["a", "Pod"], "Nodes": null, "pod":{pod}}}"#),
            format!(r#"{{"Pod": {pod}, broken"#),
        ] {
            assert_eq!(pod_text(body.as_bytes()), Some(pod));
        }
        for body in ["", "[]", "{}", r#"{"NodeNames": []}"#, r#"{"Pod": {"#] {
            assert_eq!(pod_text(body.as_bytes()), None);
        }
    }
}
