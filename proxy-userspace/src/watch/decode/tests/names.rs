//! Decodes objects and ports with invalid names.

use super::*;

/// Text that a command could interpret, and other text that the API server refuses.
const BAD_NAMES: [&str; 14] = [
    "a b",
    "a\"b",
    "a'b",
    "a\nb",
    "a\n-A INPUT -j DROP",
    "a;b",
    "a\\",
    "a\0",
    "$(a)",
    "A",
    "ä",
    "a_b",
    "a/b",
    "-a",
];

#[test]
fn an_object_without_a_valid_name_is_left_out() {
    let long = "a".repeat(64);
    for bad in BAD_NAMES.into_iter().chain([&*long]) {
        for (field, metadata) in [
            ("metadata.name", json!({"name": bad, "namespace": "shop"})),
            ("metadata.namespace", json!({"name": "web", "namespace": bad})),
        ] {
            let object = json!({"metadata": metadata, "spec": {}});
            let decoded = decoded::<Service>(&object);
            assert_eq!(decoded.object, None, "{bad:?}");
            let [problem] = &*decoded.problems else { panic!("{:?}", decoded.problems) };
            let label =
                "an RFC 1123 label: lower-case letters, digits and '-', at most 63, no '-' at either end";
            assert_eq!(problem.to_string(), format!("{field}: {bad:?} is not {label}"));
            let written = decoded.written_name.expect("a name");
            assert!(!written.contains(['\n', '\0']), "the log has one line: {written:?}");
        }
    }
    for bad in BAD_NAMES.into_iter().chain(["a..b", "a.", &*"a".repeat(254)]) {
        let object = json!({"metadata": {"name": bad}});
        assert_eq!(decoded::<EndpointSlice>(&object).object, None, "{bad:?}");
        assert_eq!(decoded::<Node>(&object).object, None, "{bad:?}");
        assert_eq!(decoded::<ServiceCidr>(&object).object, None, "{bad:?}");
    }
}

#[test]
fn a_port_without_a_valid_name_is_left_out_and_the_others_stay() {
    for bad in BAD_NAMES.into_iter().chain(["a.b", &*"a".repeat(64)]) {
        let (problems, service): (_, Service) =
            faulty(&service(&json!({"ports": [{"name": bad, "port": 80}, {"name": "ok", "port": 81}]})));
        assert!(problems.len() == 1 && problems[0].starts_with("spec.ports[0].name: "), "{problems:?}");
        assert_eq!(service.ports.iter().map(|port| &*port.name).collect::<Vec<_>>(), ["ok"]);
        let fields =
            json!({"addressType": "IPv4", "ports": [{"name": bad, "port": 80}, {"name": "ok", "port": 81}]});
        let (problems, slice): (_, EndpointSlice) = faulty(&slice(fields));
        assert!(problems.len() == 1 && problems[0].starts_with("ports[0].name: "), "{problems:?}");
        assert_eq!(slice.ports.iter().map(|port| &*port.name).collect::<Vec<_>>(), ["ok"]);
    }
}

#[test]
fn a_slice_of_a_service_without_a_valid_name_belongs_to_none() {
    let mut object = slice(json!({"addressType": "IPv4"}));
    object["metadata"]["labels"] = json!({"kubernetes.io/service-name": "a\" b"});
    let (problems, slice): (_, EndpointSlice) = faulty(&object);
    assert!(problems[0].starts_with("metadata.labels[kubernetes.io/service-name]: "), "{problems:?}");
    assert_eq!(slice.service, None);
}
