use gantry_topology::mig::Catalogue;

use super::*;

const SHIPPED: &str = include_str!("../../tests/data/mig-layouts.yaml");

fn problems(text: &str) -> String {
    MigLayouts::read("layouts.yaml", text).unwrap_err().to_string()
}

/// The problems of a layout `x` with this one entry.
fn of_entry(entry: &str) -> String {
    problems(&format!("version: v1\nmig-configs:\n  x:\n    - {entry}\n"))
}

#[test]
fn shipped_layouts_are_read() {
    let layouts = MigLayouts::read("layouts.yaml", SHIPPED).unwrap();
    assert_eq!(layouts.iter().count(), 65);
    let balanced = layouts.get("all-balanced").unwrap();
    let a100 = balanced.entry(3, "0x20B010DE".parse().unwrap()).unwrap();
    let wanted = [("1g.5gb".to_owned(), 2), ("2g.10gb".to_owned(), 1), ("3g.20gb".to_owned(), 1)];
    assert_eq!(a100.devices, Some(wanted.into()));
    assert_eq!(
        balanced.entry(0, "0x20b710de".parse().unwrap()).unwrap().devices.as_ref().unwrap()["1g.6gb"],
        2
    );
    assert_eq!(balanced.entry(0, PciId(0x1DB1_10DE)), None, "a V100 is not mentioned");
    let custom = layouts.get("custom-config").unwrap();
    assert_eq!(custom.entry(2, PciId(0)).unwrap().devices, None);
    assert_eq!(custom.entry(5, PciId(0)).unwrap().devices.as_ref().unwrap()["2g.10gb"], 3);
    assert_eq!((custom.entry(8, PciId(0)), custom.listed().len()), (None, 8));
    assert_eq!(
        layouts.get("all-enabled").unwrap().entry(0, PciId(0)).unwrap().devices,
        Some(BTreeMap::new())
    );
}

/// Every profile of every product has the form that is read, alone and in parts.
#[test]
fn every_profile_of_the_catalogue_is_read() {
    let catalogue = Catalogue::built_in();
    for profile in catalogue.products().iter().flat_map(|product| &product.profiles) {
        assert!(is_profile(&profile.name) && is_profile(&format!("1c.{}", profile.name)), "{}", profile.name);
    }
    for wrong in [
        "",
        "g.gb",
        "1g",
        "5gb",
        "1g.5",
        "xg.5gb",
        "c.1g.5gb",
        "1c.1g",
        "1g.5gb+",
        "1g.5gb+a b",
        "1g.99999gb",
    ] {
        assert!(!is_profile(wrong), "{wrong}");
    }
}

#[test]
fn unknown_layout_names_the_nearest() {
    let layouts = MigLayouts::read("layouts.yaml", SHIPPED).unwrap();
    let mut error = layouts.get("all-balancd").unwrap_err();
    assert_eq!(error.there.len(), 32);
    error.there.truncate(3);
    insta::assert_snapshot!(error, @r#"there is no layout "all-balancd", did you mean "all-balanced"?; there are: all-1g.10gb, all-1g.10gb.me, all-1g.12gb"#);
}

#[test]
fn problems_name_place_value_and_what_is_allowed() {
    let cases = [
        of_entry("{devices: all, mig-enabled: true, mig-devices: {\"1h.5gb\": 7}}"),
        of_entry("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: -1}}"),
        of_entry("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 65}}"),
        of_entry("{devices: all, mig-enabled: true}"),
        of_entry("{devices: all}"),
        of_entry("{devices: all, mig-enabled: yes please}"),
        of_entry("{device: all, mig-enabled: false}"),
        of_entry("{devices: every, mig-enabled: false}"),
        of_entry("{devices: [0, 32], mig-enabled: false}"),
        of_entry("{devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}}"),
        of_entry("{device-filter: 0x20B0, devices: all, mig-enabled: false}"),
        of_entry("{device-filter: [\"A100\"], devices: all, mig-enabled: false}"),
        of_entry("{device-filter: [], devices: all, mig-enabled: false}"),
        problems(""),
        problems("version: v2\nmig-configs: {a: [{devices: all, mig-enabled: false}]}"),
        problems("version: v1\nmig-configs: {}"),
        problems("version: v1\nmig-configs: {a: []}"),
        problems("version: v1\nmig-configs: {a b: [{devices: all, mig-enabled: false}]}"),
        problems("version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}\nmigs: 1"),
        problems("version: v1\nversion: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}"),
        problems("version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}\n---\nb: 1"),
        problems("[1"),
    ];
    insta::assert_snapshot!(cases.join("\n"), @r#"
    layouts.yaml: line 4: mig-configs.x[0].mig-devices.1h.5gb: "1h.5gb" is no MIG profile; write one as nvidia-smi mig -lgip prints it, such as 1g.5gb, 1g.5gb+me or 1c.3g.20gb
    layouts.yaml: line 4: mig-configs.x[0].mig-devices.1g.5gb: is -1, allowed are whole numbers from 0 to 64
    layouts.yaml: line 4: mig-configs.x[0].mig-devices.1g.5gb: is 65, allowed are whole numbers from 0 to 64
    layouts.yaml: line 4: mig-configs.x[0]: mig-devices is missing
    layouts.yaml: line 4: mig-configs.x[0]: mig-enabled is missing
    layouts.yaml: line 4: mig-configs.x[0].mig-enabled: is "yes please", allowed is true or false
    layouts.yaml: 2 problems: line 4: mig-configs.x[0]: devices is missing; line 4: mig-configs.x[0].device: there is no such key; allowed: device-filter, devices, mig-enabled, mig-devices; did you mean "devices"?
    layouts.yaml: line 4: mig-configs.x[0].devices: is "every", allowed is all or a list of GPU indices
    layouts.yaml: line 4: mig-configs.x[0].devices[1]: is 32, allowed are indices of GPUs from 0 to 31
    layouts.yaml: line 4: mig-configs.x[0].mig-devices: names MIG devices, and mig-enabled is false; leave it out, or enable MIG
    layouts.yaml: line 4: mig-configs.x[0].device-filter: is 8368, and must be a PCI id in quotes, such as "0x20B010DE"
    layouts.yaml: line 4: mig-configs.x[0].device-filter[0]: "A100" is no PCI id of a product; write 0x, four digits for the device and 10DE, such as 0x20B010DE
    layouts.yaml: line 4: mig-configs.x[0].device-filter: is an empty list, which selects no GPU; leave it out to select every product
    layouts.yaml: 2 problems: mig-configs is missing; version is missing
    layouts.yaml: line 1: version: "v2" is not a version that is read; write v1
    layouts.yaml: line 2: mig-configs: is empty; name at least one layout
    layouts.yaml: line 2: mig-configs.a: is empty; a layout has at least one entry
    layouts.yaml: line 2: mig-configs.a b: is no value of a label, by which a node chooses it: at most 63 letters, digits, -, _ and ., with a letter or digit at both ends
    layouts.yaml: line 3: migs: there is no such key; allowed: version, mig-configs
    layouts.yaml: line 2: not well-formed: the key version is given twice
    layouts.yaml: line 4: another YAML document begins here; the file is one document
    layouts.yaml: line 1: not well-formed: unclosed bracket '['
    "#);
}

#[test]
fn entries_that_contradict_each_other_are_refused() {
    let two = |first: &str, second: &str| {
        let text = format!("version: v1\nmig-configs:\n  x:\n    - {first}\n    - {second}\n");
        MigLayouts::read("layouts.yaml", &text).map_err(|problems| problems.to_string())
    };
    let off = "{devices: all, mig-enabled: false}";
    let error = two(off, "{devices: [1], mig-enabled: true, mig-devices: {}}").unwrap_err();
    insta::assert_snapshot!(error, @"layouts.yaml: line 5: mig-configs.x[1]: selects GPUs that mig-configs.x[0] selects too, for another layout");
    let a100 =
        r#"{device-filter: ["0x20B010DE"], devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}"#;
    assert!(two(off, a100).is_err(), "an entry for every product selects an A100 too");
    let a30 = r#"{device-filter: ["0x20B710DE"], devices: all, mig-enabled: false}"#;
    two(a30, a100).unwrap();
    two("{devices: [0], mig-enabled: false}", "{devices: [1], mig-enabled: true, mig-devices: {}}").unwrap();
    two(off, off).unwrap();
}
