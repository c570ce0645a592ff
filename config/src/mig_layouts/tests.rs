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
    let error = layouts.get("all-balancd").unwrap_err().to_string();
    assert!(
        error.starts_with(r#"there is no layout "all-balancd", did you mean "all-balanced"?; there are: "#),
        "{error}"
    );
}

#[test]
fn problems_name_place_value_and_what_is_allowed() {
    let cases = [
        (
            of_entry("{devices: all, mig-enabled: true, mig-devices: {\"1h.5gb\": 7}}"),
            r#"line 4: mig-configs.x[0].mig-devices.1h.5gb: "1h.5gb" is no MIG profile"#,
        ),
        (
            of_entry("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: -1}}"),
            "is -1, allowed are whole numbers from 0 to 64",
        ),
        (of_entry("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 65}}"), "is 65, allowed"),
        (of_entry("{devices: all, mig-enabled: true}"), "mig-devices is missing"),
        (of_entry("{devices: all}"), "mig-enabled is missing"),
        (
            of_entry("{devices: all, mig-enabled: yes please}"),
            r#"mig-enabled: is "yes please", allowed is true or false"#,
        ),
        (of_entry("{device: all, mig-enabled: false}"), r#"did you mean "devices"?"#),
        (
            of_entry("{devices: every, mig-enabled: false}"),
            r#"devices: is "every", allowed is all or a list of GPU indices"#,
        ),
        (
            of_entry("{devices: [0, 32], mig-enabled: false}"),
            "devices[1]: is 32, allowed are indices of GPUs from 0 to 31",
        ),
        (
            of_entry("{devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}}"),
            "names MIG devices, and mig-enabled is false",
        ),
        (of_entry("{device-filter: 0x20B0, devices: all, mig-enabled: false}"), "device-filter: "),
        (
            of_entry("{device-filter: [\"A100\"], devices: all, mig-enabled: false}"),
            r#"device-filter[0]: "A100" is no PCI id of a product"#,
        ),
        (of_entry("{device-filter: [], devices: all, mig-enabled: false}"), "selects no GPU"),
        (problems(""), "version is missing"),
        (
            problems("version: v2\nmig-configs: {a: [{devices: all, mig-enabled: false}]}"),
            r#"version: "v2" is not a version that is read; write v1"#,
        ),
        (problems("version: v1\nmig-configs: {}"), "mig-configs: is empty"),
        (problems("version: v1\nmig-configs: {a: []}"), "mig-configs.a: is empty"),
        (
            problems("version: v1\nmig-configs: {a b: [{devices: all, mig-enabled: false}]}"),
            "is no value of a label",
        ),
        (
            problems("version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}\nmigs: 1"),
            r#"migs: there is no such key"#,
        ),
        (
            problems("version: v1\nversion: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}"),
            "given twice",
        ),
        (
            problems("version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}\n---\nb: 1"),
            "another YAML document",
        ),
        (problems("[1"), "not well-formed"),
    ];
    for (problem, part) in cases {
        assert!(problem.contains(part), "{problem}\nlacks {part}");
    }
}

#[test]
fn entries_that_contradict_each_other_are_refused() {
    let two = |first: &str, second: &str| {
        let text = format!("version: v1\nmig-configs:\n  x:\n    - {first}\n    - {second}\n");
        MigLayouts::read("layouts.yaml", &text).map_err(|problems| problems.to_string())
    };
    let off = "{devices: all, mig-enabled: false}";
    let error = two(off, "{devices: [1], mig-enabled: true, mig-devices: {}}").unwrap_err();
    assert!(
        error.contains("line 5: mig-configs.x[1]: selects GPUs that mig-configs.x[0] selects too"),
        "{error}"
    );
    let a100 =
        r#"{device-filter: ["0x20B010DE"], devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}"#;
    assert!(two(off, a100).is_err(), "an entry for every product selects an A100 too");
    let a30 = r#"{device-filter: ["0x20B710DE"], devices: all, mig-enabled: false}"#;
    two(a30, a100).unwrap();
    two("{devices: [0], mig-enabled: false}", "{devices: [1], mig-enabled: true, mig-devices: {}}").unwrap();
    two(off, off).unwrap();
}
