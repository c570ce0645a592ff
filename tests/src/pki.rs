//! The cluster's certificate authority, its certificates, and the kubeconfigs that contain them. Every cluster gets new
//! ones.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use serde_json::json;

use crate::error::file;
use crate::{Error, Result};

/// The certificate authority of one cluster and the folder its files lie in.
pub(crate) struct Authority {
    folder: PathBuf,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Makes an authority and writes `ca.crt`, and `sa.key` with `sa.pub` for service account tokens.
    pub(crate) fn create(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).map_err(file("create", folder))?;
        let refused = |source| Error::Certificate { subject: "the authority".into(), source };
        let key = KeyPair::generate().map_err(refused)?;
        let mut params = params("gantry-e2e", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let pem = params.self_signed(&key).map_err(refused)?.pem();
        let tokens = KeyPair::generate().map_err(refused)?;
        write(&folder.join("ca.crt"), &pem)?;
        write(&folder.join("sa.key"), &tokens.serialize_pem())?;
        write(&folder.join("sa.pub"), &tokens.public_key_pem())?;
        Ok(Self { folder: folder.to_path_buf(), pem, issuer: Issuer::new(params, key) })
    }

    /// Writes `<name>.crt` and `<name>.key` for a server that is reached by these addresses and host names.
    pub(crate) fn server(&self, name: &str, reached_by: &[&str]) -> Result<()> {
        let refused = |source| Error::Certificate { subject: name.to_owned(), source };
        let mut params = params(name, None);
        for address in reached_by {
            let san = match address.parse() {
                Ok(ip) => SanType::IpAddress(ip),
                Err(_) => SanType::DnsName((*address).try_into().map_err(refused)?),
            };
            params.subject_alt_names.push(san);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(name, &params).map(drop)
    }

    /// Writes `<name>.crt` and `<name>.key` for the user `user` of the group `group`, and returns both texts.
    pub(crate) fn client(&self, name: &str, user: &str, group: Option<&str>) -> Result<(String, String)> {
        let mut params = params(user, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(name, &params)
    }

    /// Writes a kubeconfig for a user that proves itself by certificate.
    pub(crate) fn kubeconfig(
        &self,
        path: &Path,
        server: &str,
        user: &str,
        group: Option<&str>,
    ) -> Result<()> {
        let name = user.replace(':', "-");
        let (certificate, key) = self.client(&name, user, group)?;
        let user = json!({
            "client-certificate-data": base64(certificate.as_bytes()),
            "client-key-data": base64(key.as_bytes()),
        });
        write_kubeconfig(path, server, &self.pem, &user)
    }

    fn sign(&self, name: &str, params: &CertificateParams) -> Result<(String, String)> {
        let refused = |source| Error::Certificate { subject: name.to_owned(), source };
        let key = KeyPair::generate().map_err(refused)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(refused)?.pem();
        let key = key.serialize_pem();
        write(&self.folder.join(format!("{name}.crt")), &certificate)?;
        write(&self.folder.join(format!("{name}.key")), &key)?;
        Ok((certificate, key))
    }
}

/// Writes a kubeconfig with one cluster, one user and one context.
pub(crate) fn write_kubeconfig(
    path: &Path,
    server: &str,
    ca_pem: &str,
    user: &serde_json::Value,
) -> Result<()> {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "gantry",
        "contexts": [{ "name": "gantry", "context": { "cluster": "gantry", "user": "user" } }],
        "clusters": [{
            "name": "gantry",
            "cluster": { "server": server, "certificate-authority-data": base64(ca_pem.as_bytes()) },
        }],
        "users": [{ "name": "user", "user": user }],
    });
    write(path, &format!("{config:#}\n"))
}

fn params(common_name: &str, organisation: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, common_name);
    if let Some(organisation) = organisation {
        params.distinguished_name.push(DnType::OrganizationName, organisation);
    }
    params
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(file("create", folder))?;
    }
    fs::write(path, text).map_err(file("write", path))
}

/// Standard base64 with padding, as kubeconfigs carry PEM texts.
pub(crate) fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let mut group = [0u8; 3];
        group[..chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes([0, group[0], group[1], group[2]]);
        for place in 0..4 {
            let sextet = (bits >> (18 - 6 * place)) & 63;
            let letter = LETTERS.get(usize::try_from(sextet).unwrap_or(0)).copied().unwrap_or(b'=');
            text.push(char::from(if place <= chunk.len() { letter } else { b'=' }));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_pads_every_remainder() {
        let encoded = ["", "f", "fo", "foo", "foob"].map(|text| base64(text.as_bytes()));
        assert_eq!(encoded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]);
    }
}
