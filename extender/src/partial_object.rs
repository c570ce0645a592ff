//! Objects of which only the metadata is parsed: a watch must go on when another field of one of them is malformed.

use std::borrow::Cow;
use std::marker::PhantomData;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::bounded::Identity;
use crate::metadata;
use crate::watch::stream::StreamedObject;

/// An object of kind `K`, with a spec and a status of any JSON, held as `V`.
#[derive(Debug, Clone, Deserialize)]
#[serde(bound = "V: Default + Deserialize<'de>")]
pub struct PartialObject<K, V = serde_json::Value> {
    /// Its metadata.
    #[serde(default, deserialize_with = "metadata::read")]
    pub metadata: ObjectMeta,
    /// Its spec.
    #[serde(default)]
    pub spec: V,
    /// Its status.
    #[serde(default)]
    pub status: Option<V>,
    /// Its kind, for the path of the API.
    #[serde(skip)]
    pub kind: PhantomData<K>,
}

impl<K, V: Default> Default for PartialObject<K, V> {
    fn default() -> Self {
        Self { metadata: ObjectMeta::default(), spec: V::default(), status: None, kind: PhantomData }
    }
}

impl<K: kube::Resource<DynamicType = ()>, V> kube::Resource for PartialObject<K, V> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind(of: &()) -> Cow<'_, str> {
        K::kind(of)
    }

    fn group(of: &()) -> Cow<'_, str> {
        K::group(of)
    }

    fn version(of: &()) -> Cow<'_, str> {
        K::version(of)
    }

    fn plural(of: &()) -> Cow<'_, str> {
        K::plural(of)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl<K, V> StreamedObject for PartialObject<K, V>
where
    K: kube::Resource<DynamicType = ()> + Send + 'static,
    V: Default + DeserializeOwned + Send + 'static,
    Self: Clone + std::fmt::Debug,
{
    fn least(identity: Identity, _: &[u8]) -> Self {
        Self { metadata: identity.into(), ..Self::default() }
    }
}
