//! Reads JSON into at most so many bytes of memory. `{}` is three bytes of a list and a toleration of a hundred: the
//! length of the text does not bound what it takes. Fields that a type does not read cost nothing.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Bytes of a text in addition to its characters: the header of its allocation, and what rounds it up.
const TEXT: usize = 32;
/// Bytes of an entry of a map in addition to its key and value.
const ENTRY: usize = 16;

/// Why a value was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It takes more memory than allowed.
    #[error("more than {0} bytes of it would be read")]
    TooLarge(usize),
    /// It is no JSON of that type.
    #[error(transparent)]
    Malformed(#[from] serde_json::Error),
}

/// Reads a value that takes at most about `limit` bytes, and returns how many it takes.
///
/// # Errors
/// See [`ReadError`].
pub(crate) fn read<'de, T: Deserialize<'de>>(json: &'de [u8], limit: usize) -> Result<(T, usize), ReadError> {
    let meter = Meter { used: Cell::new(0), limit };
    let mut reader = serde_json::Deserializer::from_slice(json);
    let read = T::deserialize(Metered { inner: &mut reader, meter: &meter });
    let used = meter.used.get();
    if used > limit {
        return Err(ReadError::TooLarge(limit));
    }
    let value = read?;
    reader.end()?;
    Ok((value, used))
}

/// What identifies an object. Read also from the beginning of an object that is not read whole: the API server writes
/// the metadata before spec and status.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Identity {
    pub(crate) namespace: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
}

impl Identity {
    /// The identity of an object of which `json` is all or the beginning.
    pub(crate) fn of(json: &[u8]) -> Option<Self> {
        let mut found = None;
        let mut reader = serde_json::Deserializer::from_slice(json);
        // It may end in the middle of a value behind the metadata.
        let _ = FindIdentity(&mut found).deserialize(&mut reader);
        found
    }
}

impl From<Identity> for ObjectMeta {
    fn from(identity: Identity) -> Self {
        let Identity { namespace, name, uid, resource_version } = identity;
        Self { namespace, name, uid, resource_version, ..Self::default() }
    }
}

struct FindIdentity<'f>(&'f mut Option<Identity>);

impl<'de> DeserializeSeed<'de> for FindIdentity<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FindIdentity<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            match key.as_ref() {
                "metadata" => *self.0 = Some(map.next_value()?),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

struct Meter {
    used: Cell<usize>,
    limit: usize,
}

impl Meter {
    fn charge<E: de::Error>(&self, bytes: usize) -> Result<(), E> {
        let used = self.used.get().saturating_add(bytes);
        self.used.set(used);
        if used > self.limit {
            return Err(E::custom("too large"));
        }
        Ok(())
    }
}

/// A deserializer, visitor, access or seed that charges what is read.
struct Metered<'m, T> {
    inner: T,
    meter: &'m Meter,
}

/// The fields of a struct: they are part of a value that is charged already.
struct Fields<'m, T>(Metered<'m, T>);

macro_rules! forward_deserialize {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method(Metered { inner: visitor, meter: self.meter })
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Metered<'_, D> {
    type Error = D::Error;

    forward_deserialize! {
        deserialize_any deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_i128 deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64 deserialize_char deserialize_str deserialize_string deserialize_bytes
        deserialize_byte_buf deserialize_option deserialize_unit deserialize_seq deserialize_map
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_unit_struct(name, Metered { inner: visitor, meter: self.meter })
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_newtype_struct(name, Metered { inner: visitor, meter: self.meter })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_tuple(length, Metered { inner: visitor, meter: self.meter })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_tuple_struct(name, length, Metered { inner: visitor, meter: self.meter })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let visitor = Fields(Metered { inner: visitor, meter: self.meter });
        self.inner.deserialize_struct(name, fields, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_enum(name, variants, visitor)
    }

    // Names of fields and variants, and what is passed over, are not kept.
    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_identifier(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_ignored_any(visitor)
    }
}

macro_rules! forward_visit {
    ($($method:ident $kind:ty,)*) => {$(
        fn $method<E: de::Error>(self, value: $kind) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )*};
}

macro_rules! charge_visit {
    ($($method:ident $kind:ty,)*) => {$(
        fn $method<E: de::Error>(self, value: $kind) -> Result<V::Value, E> {
            self.meter.charge(TEXT + value.len())?;
            self.inner.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Metered<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    forward_visit! {
        visit_bool bool, visit_i64 i64, visit_i128 i128, visit_u64 u64, visit_u128 u128, visit_f64 f64,
        visit_char char,
    }
    charge_visit! {
        visit_str &str, visit_borrowed_str &'de str, visit_string String, visit_bytes &[u8],
        visit_borrowed_bytes &'de [u8], visit_byte_buf Vec<u8>,
    }

    fn visit_none<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, reader: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Metered { inner: reader, meter: self.meter })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, reader: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(Metered { inner: reader, meter: self.meter })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Metered { inner: access, meter: self.meter })
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Metered { inner: access, meter: self.meter })
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Fields<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.inner.expecting(f)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.0.visit_seq(access)
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let meter = self.0.meter;
        self.0.inner.visit_map(Fields(Metered { inner: access, meter }))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Metered<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let element = self.inner.next_element_seed(Metered { inner: seed, meter: self.meter })?;
        if element.is_some() {
            self.meter.charge(size_of::<S::Value>())?;
        }
        Ok(element)
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Metered<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let key = self.inner.next_key_seed(Metered { inner: seed, meter: self.meter })?;
        if key.is_some() {
            self.meter.charge(size_of::<S::Value>() + ENTRY)?;
        }
        Ok(key)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.meter.charge(size_of::<S::Value>())?;
        self.inner.next_value_seed(Metered { inner: seed, meter: self.meter })
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Fields<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.inner.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.0.inner.next_value_seed(Metered { inner: seed, meter: self.0.meter })
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Metered<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(Metered { inner: reader, meter: self.meter })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Item {
        key: String,
        values: Vec<String>,
        more: BTreeMap<String, Value>,
        choice: Option<Choice>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    enum Choice {
        One,
        Two(u8),
    }

    fn bytes(value: &Value) -> Vec<u8> {
        value.to_string().into_bytes()
    }

    #[test]
    fn value_within_the_limit_is_read_as_without_a_meter() {
        let written = bytes(&json!([
            {"key": "a\n", "values": ["x", "y"], "more": {"n": null, "f": 1.5, "l": [true, {"d": -1}]}, "choice": "One"},
            {"choice": {"Two": 2}, "unknown": {"any": [1, 2, 3]}},
        ]));
        let (read, used) = read::<Vec<Item>>(&written, 10_000).unwrap();
        assert_eq!(read, serde_json::from_slice::<Vec<Item>>(&written).unwrap());
        assert!(used >= 2 * size_of::<Item>(), "{used}");
        assert!(matches!(super::read::<Vec<Item>>(&written, used - 1), Err(ReadError::TooLarge(_))));
        assert!(matches!(super::read::<Item>(b"{\"key\": 3}", 100), Err(ReadError::Malformed(_))));
        assert!(matches!(super::read::<Item>(b"{} x", 100), Err(ReadError::Malformed(_))));
    }

    #[test]
    fn empty_elements_are_charged_by_their_size() {
        // Three bytes of JSON each, and a hundred of memory.
        let written = format!("[{}{{}}]", "{},".repeat(9_999));
        let error = read::<Vec<Item>>(written.as_bytes(), 9_999 * size_of::<Item>()).unwrap_err();
        assert!(matches!(error, ReadError::TooLarge(_)));
        read::<Vec<Item>>(written.as_bytes(), 10_000 * size_of::<Item>()).unwrap();
    }

    #[test]
    fn fields_that_are_not_read_cost_nothing() {
        let written =
            bytes(&json!({"key": "", "unknown": vec![json!({"a": "b"}); 1_000], ("x".repeat(9_000)): 1}));
        let (_, used) = read::<Item>(&written, 100).unwrap();
        assert_eq!(used, TEXT);
    }

    #[test]
    fn identity_is_read_from_a_part_of_an_object() {
        let written = r#"{"kind":"Pod","metadata":{"name":"a","namespace":"ml","uid":"u","resourceVersion":"7","labels":{"x":"y"}},"spec":{"tolera"#;
        let identity = Identity::of(written.as_bytes()).unwrap();
        assert_eq!(identity.name.as_deref(), Some("a"));
        assert_eq!(identity.uid.as_deref(), Some("u"));
        assert_eq!(identity.resource_version.as_deref(), Some("7"));
        assert!(Identity::of(b"{\"spec\": {}").is_none());
    }
}
